"""`POST /v1/responses`: stateless."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError
from foredraft.core.logprobs import TokenLogprobs
from foredraft.engine.request import Event
from foredraft.models.text.prompts import malformed, text_of
from foredraft.server.answers import (
    AnswerWriter,
    CallerDep,
    ContextDep,
    error_responses,
    in_one_step,
    now,
    respond,
    streamed,
)
from foredraft.server.bodies import ParsedRoute
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import Items, Refused, Sets, entries
from foredraft.server.dialects.request import ConversationFields, read_conversation
from foredraft.server.dialects.sampling import Schema, Stops, Tools, format_grammar
from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation, GenerationRequest, ReplyState
from foredraft.server.logprobs import ReplyLogprobs, chat_logprobs
from foredraft.server.replies import Block, Change
from foredraft.server.thinking import Thinking
from foredraft.server.usage import num_cached, num_reasoning
from foredraft.server.wire import named_event

router = APIRouter(route_class=ParsedRoute)

_ANSWER: dict[str, type] = {
    "id": str,
    "object": str,
    "created_at": int,
    "status": str,
    "model": str,
    "output": list,
    "usage": dict,
}
_LOGPROBS = "message.output_text.logprobs"
_UNREAD = ("reasoning", "item_reference", "additional_tools")
_ARGUMENTS = "response.function_call_arguments"
_STATELESS = "nothing is stored: send the conversation so far as input"


class ResponsesRequest(ConversationFields):
    """Items to be replied to."""

    conversation_field: ClassVar[str] = "input"

    stop: Stops = None
    input: Annotated[str | Items[dict[str, Any]] | None, entries("max_messages")] = None
    instructions: str | None = None
    max_output_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Sets("max_tokens")] = None
    text: Annotated[Schema, Sets("grammar", format_grammar)] = None
    tools: Tools = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Items[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    previous_response_id: Annotated[Any, Refused(_STATELESS)] = None
    conversation: Annotated[Any, Refused(_STATELESS)] = None
    background: Annotated[Any, Refused("a reply lasts as long as its connection", False)] = None
    prompt: Annotated[Any, Refused("there are no stored prompts")] = None
    max_tool_calls: Annotated[Any, Refused("the client runs the tools")] = None
    moderation: Annotated[Any, Refused("there is none")] = None

    def parameters(self) -> dict[str, tuple[str, Any]]:
        parameters = super().parameters()
        if _LOGPROBS in (self.include or ()):
            parameters["logprobs"] = ("top_logprobs", self.top_logprobs or 0)
        return parameters

    def asked_thinking(self) -> Thinking:
        effort = (self.reasoning or {}).get("effort")
        if not isinstance(effort, str | None):
            raise ConfigError(f"reasoning.effort is {shown(effort)}, no text", field="reasoning")
        found = super().asked_thinking()
        return replace(found, effort=effort, field="reasoning") if effort else found

    def chat_messages(self) -> list[dict[str, Any]]:
        said = []
        if self.instructions is not None:
            said = [{"role": "system", "content": text_of("instructions", self.instructions)}]
        said += _messages(self.input or "")
        return said or [{"role": "user", "content": ""}]  # what agents send as a probe

    def chat_tools(self) -> dict[str, Any]:
        """Tools that the provider itself would run are left out."""
        choice = self.tool_choice
        tools = [_tool(tool) for tool in self.tools or () if _is_function(tool)]
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            tools, choice = _allowed(tools, choice), choice.get("mode", "auto")
        if isinstance(choice, Mapping) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return {
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    def ignored(self) -> list[str]:
        hosted = [i for i, tool in enumerate(self.tools or ()) if not _is_function(tool)]
        items = self.input if isinstance(self.input, list) else []
        unread = [f"input[{i}]" for i, item in enumerate(items) if _is_unread(item)]
        unread += ["truncation"] * (self.truncation == "auto")
        return sorted([*super().ignored(), *unread, *(f"tools[{number}]" for number in hosted)])


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    said: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where, kind = f"input[{number}]", item.get("type", "message")
        if kind == "function_call":  # it belongs to what the assistant said before it
            if not said or said[-1]["role"] != "assistant":
                said.append({"role": "assistant", "content": None})
            said[-1].setdefault("tool_calls", []).append(_call(item))
        elif kind == "message":
            content = text_of(f"{where}.content", item.get("content"))
            said.append({"role": item.get("role"), "content": content})
        elif kind == "function_call_output":
            content = text_of(f"{where}.output", item.get("output"))
            said.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
        elif not _is_unread(item):
            raise malformed(where, f"is of type {shown(kind)}, which is not supported")
    return said


def _is_unread(item: Mapping[str, Any]) -> bool:
    """Whether an item is left out: thoughts of earlier turns, and what the provider itself runs."""
    kind = str(item.get("type", "message"))
    is_hosted = kind.endswith(("_call", "_call_output")) and not kind.startswith("function_call")
    return is_hosted or kind in _UNREAD


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _is_function(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "function"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _allowed(tools: list[dict[str, Any]], choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that the choice names."""
    named = choice.get("tools")
    if not isinstance(named, list) or not all(isinstance(each, Mapping) for each in named):
        raise ConfigError(
            f"tool_choice.tools must be a list, not {shown(named)}", field="tool_choice"
        )
    names = {each.get("name") for each in named if _is_function(each)}
    return [tool for tool in tools if tool["function"].get("name") in names]


@router.post(
    "/v1/responses",
    responses={200: streamed("a reply, whole or as events", **_ANSWER), **error_responses()},
)
async def create_response(
    body: ResponsesRequest, request: Request, context: ContextDep, caller: CallerDep
) -> Response:
    """Reply to a conversation. Nothing is stored."""
    wanted = await context.on_thread(caller.size, read_conversation, context, body, caller)
    return await respond(ResponsesWriter(context, wanted, body), body.stream, request)


class ResponsesWriter(AnswerWriter):
    """Writes the answer to a request for a response."""

    def __init__(
        self, context: ServerContext, request: GenerationRequest, body: ResponsesRequest
    ) -> None:
        super().__init__(context, request)
        self._numbers = itertools.count()
        self._parser = request.new_parser()
        self._is_over = self._is_cut = False
        self._entries = ReplyLogprobs(  # of text to come
            context.tokenizer, request.prompts[0], request.params.skip_special_tokens
        )
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # of text that has come, by block
        self._response = _begun(request, body)

    def begin(self, generation: Generation) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._response})

    def step(self, generation: Generation, index: int, event: Event) -> Iterator[bytes]:
        return map(self._numbered, self._taken(event))

    def _taken(self, event: Event) -> Iterator[dict[str, Any]]:
        """The events of a step, without their numbers."""
        self._is_over = event.result is not None
        self._is_cut = event.result is not None and event.result.finish_reason == "length"
        self._entries.add(event.logprobs)
        for change in self._parser.take(event):
            yield from self._changed(change)

    def end(self, generation: Generation) -> Iterator[bytes]:
        response = self._finished(generation)
        yield self._numbered({"type": f"response.{response['status']}", "response": response})

    def answer(self, generation: Generation) -> dict[str, Any]:
        for _ in self._taken(in_one_step(generation.replies[0].result)):
            pass  # what they say is in the items of the whole answer
        return self._finished(generation)

    def error_event(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        named = {"code": error.code, "message": error.message, "param": error.param}
        last = self._numbered({"type": "response.failed", "response": self._response | failed})
        return last + self._numbered({"type": "error", **named})

    def _numbered(self, event: Mapping[str, Any]) -> bytes:
        return named_event({**event, "sequence_number": next(self._numbers)})

    def _finished(self, generation: Generation) -> dict[str, Any]:
        reply = generation.replies[0]
        return self._response | {
            "status": "incomplete" if self._is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "completed_at": None if self._is_cut else now(),
            "output": [self._item(block, is_over=True) for block in self._parser.blocks],
            "usage": _usage(reply, num_reasoning(reply, self.request, self.tokenizer)),
            **self.metrics(generation),
        }

    def _changed(self, change: Change) -> Iterator[dict[str, Any]]:
        block, is_over = change.block, change.kind == "close"
        at: dict[str, Any] = {"output_index": block.number, "item_id": self._item_id(block)}
        if change.kind == "open":
            item = self._item(replace(block, text=""), False)
            yield {"type": "response.output_item.added", "output_index": block.number, "item": item}
        if block.kind != "call":
            yield from self._part_events(change, at | {"content_index": 0})
        elif change.kind == "delta":
            yield {"type": f"{_ARGUMENTS}.delta", **at, "delta": change.text}
        elif is_over:
            done = {"name": block.name, "arguments": block.text}
            yield {"type": f"{_ARGUMENTS}.done", **at, **done}
        if is_over:
            item = self._item(block, True)
            yield {"type": "response.output_item.done", "output_index": block.number, "item": item}

    def _part_events(self, change: Change, at: dict[str, Any]) -> Iterator[dict[str, Any]]:
        block, extra = change.block, dict[str, Any]()
        kind = "output_text" if block.kind == "text" else "reasoning_text"
        if block.kind == "text":
            extra = {"logprobs": self._formatted(self._entries_of(change))}
        if change.kind == "open":
            part = self._part(replace(block, text=""), False)
            yield {"type": "response.content_part.added", **at, "part": part}
        elif change.kind == "delta":
            yield {"type": f"response.{kind}.delta", **at, "delta": change.text, **extra}
        else:
            yield {"type": f"response.{kind}.done", **at, "text": block.text, **extra}
            yield {"type": "response.content_part.done", **at, "part": self._part(block, True)}

    def _entries_of(self, change: Change) -> Sequence[TokenLogprobs]:
        """Log probabilities for an event of a text: of its new part, at its end of all.

        They are those of the tokens that begin in it; behind the last text of a reply come those
        of tokens without text.
        """
        if self.request.params.logprobs is None or change.kind == "open":
            return ()
        block = change.block
        entries = self._logprobs.setdefault(block.number, [])
        if change.kind == "delta":
            new = self._entries.take(change.at, change.end)
            entries += new
            return new
        if self._is_over and block is self._parser.blocks[-1]:
            entries += self._entries.take(0)
        return entries

    def _formatted(self, entries: Sequence[TokenLogprobs]) -> Any:
        return chat_logprobs(self.tokenizer, entries)["content"]

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self.request.reply_id}{block.number:x}"

    def _item(self, block: Block, is_over: bool) -> dict[str, Any]:
        status = "completed" if is_over else "in_progress"
        if is_over and self._is_cut and block is self._parser.blocks[-1]:
            status = "incomplete"
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        content = [self._part(block, is_over)] if is_over else []
        if block.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": content}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        call_id = f"call_{self.request.reply_id}{block.number:x}"
        named = {"call_id": call_id, "name": block.name, "arguments": block.text}
        return item | {"type": "function_call", **named}

    def _part(self, block: Block, is_over: bool) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        entries = self._logprobs.get(block.number, []) if is_over else []
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._formatted(entries),
        }


def _begun(request: GenerationRequest, body: ResponsesRequest) -> dict[str, Any]:
    params, extra = request.params, body.model_extra or {}
    return {
        "id": f"resp_{request.reply_id}",
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.tools.parallel,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
        "store": False,
        "temperature": params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": extra.get("user"),
        "metadata": extra.get("metadata") or {},
    }


def _usage(reply: ReplyState, num_thoughts: int) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached([reply]), "cache_write_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }
