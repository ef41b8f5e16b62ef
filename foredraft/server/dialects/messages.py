"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError
from foredraft.engine.request import Event
from foredraft.models.text.prompts import malformed, text_of
from foredraft.server.answers import (
    AnswerWriter,
    CallerDep,
    ContextDep,
    error_responses,
    in_one_step,
    json_answer,
    respond,
    streamed,
)
from foredraft.server.bodies import ParsedRoute
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import Items, Refused, RequestBody, Sets, entries
from foredraft.server.dialects.request import (
    ConversationFields,
    encode_conversation,
    read_conversation,
)
from foredraft.server.dialects.sampling import (
    Schema,
    Tools,
    Words,
    format_grammar,
    response_grammar,
)
from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation, GenerationRequest, ReplyState, finish_reason
from foredraft.server.replies import Block, Change
from foredraft.server.settings import ServerSettings
from foredraft.server.thinking import Thinking
from foredraft.server.tools import read_tools
from foredraft.server.usage import num_cached
from foredraft.server.wire import JsonResponse, named_event

router = APIRouter(route_class=ParsedRoute)

_ERRORS = error_responses(type=str, error=dict)
_ANSWER: dict[str, type] = {
    "id": str,
    "type": str,
    "role": str,
    "content": list,
    "model": str,
    "stop_reason": str,
    "usage": dict,
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ROLES = ("user", "assistant", "system")


class CountRequest(RequestBody):
    """A conversation to be counted. Fields of a reply are accepted, and do not matter."""

    model: str | None = None
    messages: Annotated[Items[dict[str, Any]], Field(min_length=1), entries("max_messages")]
    system: str | Items[dict[str, Any]] | None = None
    tools: Tools = None
    tool_choice: dict[str, Any] | None = None

    def chat_messages(self) -> list[dict[str, Any]]:
        system = []
        if self.system:
            system = [{"role": "system", "content": text_of("system", self.system)}]
        return [*system, *_messages(self.messages)]

    def chat_tools(self) -> dict[str, Any]:
        """Tools that the provider itself would run are left out."""
        tools = [_tool(tool) for tool in self.tools or () if _is_custom(tool)]
        return {"tools": tools} | ({} if self.tool_choice is None else _choice(self.tool_choice))


class MessagesRequest(CountRequest, ConversationFields):
    """A conversation to be replied to."""

    def check_limits(self, settings: ServerSettings) -> None:
        super().check_limits(settings)
        if self.messages[-1].get("role") == "assistant":
            raise ConfigError(
                "messages ends with one of the assistant, and a reply here begins anew: leave it "
                "out (output_config may bind the form of a reply)",
                field="messages",
            )

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[Words, Sets("stop")] = None
    output_config: Annotated[Schema, Sets("grammar", format_grammar)] = None
    output_format: Annotated[Schema, Sets("grammar", response_grammar)] = None

    thinking: dict[str, Any] | None = None

    container: Annotated[Any, Refused("nothing is kept between requests")] = None
    mcp_servers: Annotated[Any, Refused("this server makes no requests of its own", [])] = None
    inference_geo: Annotated[Any, Refused("there is one machine here")] = None

    def asked_thinking(self) -> Thinking:
        found, asked = super().asked_thinking(), self.thinking or {}
        kind, budget = asked.get("type"), asked.get("budget_tokens")
        if kind not in (None, "enabled", "disabled", "adaptive"):
            raise ConfigError(f"thinking.type is {shown(kind)}", field="thinking")
        if not (budget is None or (type(budget) is int and budget >= 0)):
            raise ConfigError(f"thinking.budget_tokens is {shown(budget)}", field="thinking")
        if kind in ("enabled", "disabled"):
            found = replace(found, is_on=kind == "enabled", field="thinking")
        return found if budget is None else replace(found, budget=budget)

    def ignored(self) -> list[str]:
        hosted = [i for i, tool in enumerate(self.tools or ()) if not _is_custom(tool)]
        return sorted([*super().ignored(), *(f"tools[{number}]" for number in hosted)])


def _messages(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.get("role") not in _ROLES:
            raise malformed(where, "needs a role, user or assistant")
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": message["role"], "content": content}
        elif isinstance(content, list):
            yield from _blocks(f"{where}.content", str(message["role"]), content)
        else:
            raise malformed(f"{where}.content", f"is {shown(content)}; it must be text")


def _blocks(where: str, role: str, blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """Results of tools become messages of their own; text and calls stay together."""

    def rest() -> Iterator[dict[str, Any]]:
        if texts or calls:
            message: dict[str, Any] = {"role": role, "content": "".join(texts)}
            message |= {"tool_calls": [*calls]} if calls else {}
            yield message | ({"reasoning": "".join(thoughts)} if thoughts else {})
        texts.clear()
        calls.clear()

    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        at = f"{where}[{number}]"
        if kind == "text":
            texts.append(text_of(at, [block]))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_result":
            yield from rest()
            content = text_of(f"{at}.content", block.get("content") or "")
            if block.get("is_error"):
                content = f"Error: {content}"
            yield {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}
        elif kind != "redacted_thinking":
            raise malformed(at, f"is of type {shown(kind)}; text is all there is here")
    if not blocks:
        yield {"role": role, "content": ""}
    yield from rest()


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _is_custom(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type", "custom") in ("custom", None)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind not in (*_CHOICES, "tool"):
        raise ConfigError(f"tool_choice is {shown(choice)}", field="tool_choice")
    parallel = not choice.get("disable_parallel_tool_use", False)
    chosen: Any = _CHOICES.get(str(kind))
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tool_choice": chosen, "parallel_tool_calls": parallel}


@router.post(
    "/v1/messages",
    responses={200: streamed("a reply, whole or as events", **_ANSWER), **_ERRORS},
)
async def create_message(
    body: MessagesRequest, request: Request, context: ContextDep, caller: CallerDep
) -> Response:
    """Reply to a conversation."""
    wanted = await context.on_thread(caller.size, read_conversation, context, body, caller)
    return await respond(MessagesWriter(context, wanted), body.stream, request)


@router.post(
    "/v1/messages/count_tokens",
    responses={200: json_answer("how long a conversation is", input_tokens=int), **_ERRORS},
)
async def count_tokens(body: CountRequest, context: ContextDep, caller: CallerDep) -> Response:
    """Count the tokens of a conversation in the model's template, system and tools included."""
    context.check_model(body.model)

    def count() -> int:
        body.check_limits(context.settings)
        tools = read_tools(body.chat_tools(), context.takes_tools)
        return len(encode_conversation(context, body.chat_messages(), tools))

    return JsonResponse({"input_tokens": await context.on_thread(caller.size, count)})


class MessagesWriter(AnswerWriter):
    """Writes the answer to a messages request."""

    def __init__(self, context: ServerContext, request: GenerationRequest) -> None:
        super().__init__(context, request)
        self._parser = request.new_parser()

    def begin(self, generation: Generation) -> Iterator[bytes]:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = _usage(generation.replies[0])
        yield named_event({"type": "message_start", "message": message})

    def step(self, generation: Generation, index: int, event: Event) -> Iterator[bytes]:
        for change in self._parser.take(event):
            yield named_event(self._event(change))

    def end(self, generation: Generation) -> Iterator[bytes]:
        delta, usage = self._delta(generation)
        yield named_event({"type": "message_delta", "delta": delta, "usage": usage})
        yield named_event({"type": "message_stop"})

    def answer(self, generation: Generation) -> dict[str, Any]:
        self._parser.take(in_one_step(generation.replies[0].result))
        content = [self._content(block) for block in self._parser.blocks]
        delta, usage = self._delta(generation)
        return {
            **self._head,
            "content": content,
            **delta,
            "usage": usage,
            **self.metrics(generation),
        }

    def error_event(self, error: ApiError) -> bytes:
        return named_event(error.for_anthropic)

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request.reply_id}",
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
        }

    def _delta(self, generation: Generation) -> tuple[dict[str, Any], dict[str, int]]:
        """How the reply has ended, and its usage."""
        reply = generation.replies[0]
        assert reply.result is not None
        stop = reply.result.stop_string
        reason = _REASONS[finish_reason(reply.result, self._parser.num_calls)]
        reason = "stop_sequence" if stop else reason
        return {"stop_reason": reason, "stop_sequence": stop}, _usage(reply)

    def _event(self, change: Change) -> dict[str, Any]:
        block = change.block
        if change.kind == "open":
            begun = replace(block, text="")
            kind = {"type": "content_block_start", "content_block": self._content(begun)}
        elif change.kind == "close":
            kind = {"type": "content_block_stop"}
        else:
            kind = {"type": "content_block_delta", "delta": _delta(block, change.text)}
        return {"index": block.number, **kind}

    def _content(self, block: Block) -> dict[str, Any]:
        if block.kind == "call":
            call_id = f"toolu_{self.request.reply_id}{block.number:x}"
            return {"type": "tool_use", "id": call_id, "name": block.name, "input": _input(block)}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        return {"type": "text", "text": block.text}


def _delta(block: Block, text: str) -> dict[str, str]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _input(block: Block) -> dict[str, Any]:
    """Arguments as data; text that is not a JSON object (a truncated reply) is kept as text."""
    try:
        value = from_json(block.text or "{}", allow_inf_nan=False)
    except ValueError:
        return {"_unparsed": block.text}
    return value if isinstance(value, dict) else {"_unparsed": block.text}


def _usage(reply: ReplyState) -> dict[str, int]:
    cached = num_cached([reply])
    return {
        "input_tokens": reply.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": reply.num_tokens,
    }
