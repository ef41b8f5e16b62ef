"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.errors import ConfigError
from foredraft.engine.request import Event, GenerationResult
from foredraft.server.answers import CallerDep, ContextDep, error_responses, respond, streamed
from foredraft.server.bodies import ParsedRoute
from foredraft.server.context import ServerContext
from foredraft.server.dialects.choices import (
    ANSWER,
    ChoicesFields,
    ChoicesWriter,
    StreamOptions,
)
from foredraft.server.dialects.fields import Items, Refused, Sets, entries
from foredraft.server.dialects.request import ConversationFields, read_conversation
from foredraft.server.dialects.sampling import Tools
from foredraft.server.generation import Generation, GenerationRequest, finish_reason
from foredraft.server.logprobs import chat_logprobs
from foredraft.server.replies import Change
from foredraft.server.thinking import Thinking

router = APIRouter(route_class=ParsedRoute)


class ChatRequest(ChoicesFields, ConversationFields):
    """A conversation to be replied to."""

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1), entries("max_messages")]
    logprobs: Annotated[bool | None, Sets("")] = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    suffix: Annotated[Any, Refused("use /v1/completions", "")] = None
    echo: Annotated[Any, Refused("use /v1/completions", False)] = None

    def parameters(self) -> dict[str, tuple[str, Any]]:
        parameters = super().parameters()
        if self.logprobs:
            parameters["logprobs"] = ("top_logprobs", self.top_logprobs or 0)
        elif self.top_logprobs:
            raise ConfigError("top_logprobs needs logprobs: true", field="top_logprobs")
        return parameters

    def asked_thinking(self) -> Thinking:
        found = super().asked_thinking()
        if self.reasoning_effort is None:
            return found
        return replace(found, effort=self.reasoning_effort, field="reasoning_effort")

    def chat_messages(self) -> list[dict[str, Any]]:
        return self.messages

    def chat_tools(self) -> dict[str, Any]:
        return {
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }


@router.post(
    "/v1/chat/completions",
    responses={200: streamed("replies, whole or as events", **ANSWER), **error_responses()},
)
async def create_chat_completion(
    body: ChatRequest, request: Request, context: ContextDep, caller: CallerDep
) -> Response:
    """Reply to a conversation."""
    options = body.check_stream_options()
    wanted = await context.on_thread(caller.size, read_conversation, context, body, caller)
    return await respond(ChatWriter(context, wanted, options), body.stream, request)


class ChatWriter(ChoicesWriter):
    """Writes the answer to a chat request."""

    id_prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    last_piece: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(
        self, context: ServerContext, request: GenerationRequest, options: StreamOptions
    ) -> None:
        super().__init__(context, request, options)
        self._parsers = [request.new_parser() for _ in range(request.params.n)]
        old_name = ("reasoning_content",) if context.settings.reasoning_content else ()
        self._reasoning = ("reasoning", *old_name)

    def begin(self, generation: Generation) -> Iterator[bytes]:
        for index in range(len(self._parsers)):
            yield self.chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, event: Event) -> dict[str, Any] | None:
        delta = self._delta(self._parsers[index].take(event))
        logprobs = self._logprobs(event.logprobs)
        return {"delta": delta, "logprobs": logprobs} if delta or logprobs else None

    def reason(self, index: int, result: GenerationResult) -> str:
        return finish_reason(result, self._parsers[index].num_calls)

    def choice(self, index: int, event: Event) -> dict[str, Any]:
        choice = super().choice(index, event)
        message = {"role": "assistant", "content": None, **choice.pop("delta")}
        for call in message.get("tool_calls", []):
            del call["index"]
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return {"message": message | {"refusal": None}, **choice}

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any] | None:
        if self.request.params.logprobs is None or not entries:
            return None
        return chat_logprobs(self.tokenizer, entries)

    def _delta(self, changes: Sequence[Change]) -> dict[str, Any]:
        """The changes of a step, as an addition to a message."""
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for change in changes:
            block = change.block
            if block.kind == "call" and change.kind == "open":
                calls.append(_new_call(block.call, block.name))
            elif block.kind == "call" and change.kind == "delta":
                if not calls or calls[-1]["index"] != block.call:
                    calls.append({"index": block.call, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += change.text
            elif change.kind == "delta":
                for name in ("content",) if block.kind == "text" else self._reasoning:
                    delta[name] = delta.get(name, "") + change.text
        return delta | ({"tool_calls": calls} if calls else {})


def _new_call(index: int, name: str) -> dict[str, Any]:
    return {
        "index": index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
