"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.engine.events import Event
from foredraft.server.asks import Ask, read_chat
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import ignored
from foredraft.server.errors import ApiError
from foredraft.server.finishing import finish_reason
from foredraft.server.generation import Generation
from foredraft.server.logprobs import chat_logprobs
from foredraft.server.replies import Part
from foredraft.server.routes.common import Context, KeyId, new_id, now, respond
from foredraft.server.schemas.chat import ChatCompletion, ChatRequest
from foredraft.server.schemas.common import error_responses, streamed
from foredraft.server.streaming import StreamOptions, stream_options
from foredraft.server.usage import speculation_of, usage_of
from foredraft.server.wire import DONE, data_event

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    responses={200: streamed("replies, whole or as events", ChatCompletion), **error_responses()},
)
async def create_chat_completion(
    body: ChatRequest, request: Request, context: Context, key_id: KeyId
) -> Response:
    """Reply to a conversation."""
    plain = body.plain()
    ask = await read_chat(context, plain, key_id)
    chat = Chat(context, ask, stream_options(plain))
    return await respond(chat, plain, ignored(plain, "chat"), context, request)


class Chat:
    """One chat request, on its way to an answer."""

    def __init__(self, context: ServerContext, ask: Ask, options: StreamOptions) -> None:
        self._context, self._ask, self._options = context, ask, options
        self._id, self._created = new_id("chatcmpl-"), now()
        self._parsers = [ask.new_parser() for _ in range(ask.params.n)]
        self._names = _Names(context.settings.reasoning_content)

    async def whole(self) -> dict[str, Any]:
        """The answer when all is there."""
        async with self._ask.open(self._context) as generation:
            async for _ in generation:
                pass
            choices = [self._choice(index, generation) for index in range(len(generation.replies))]
            answer = self._answer("chat.completion", choices)
            answer["usage"] = self._usage(generation)
            if metrics := speculation_of(generation.replies, self._detail):
                answer["metrics"] = metrics
            return answer

    def error_event(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""
        return data_event(error.for_openai)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes, an event a step."""
        options = self._options
        async with self._ask.open(self._context) as generation:
            for index in range(len(generation.replies)):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            async for index, event in generation:
                usage = self._usage(generation) if options.continuous_usage else None
                delta = self._names.delta(self._parsers[index].take(event))
                logprobs = self._logprobs(event)
                if delta or logprobs:
                    yield self._chunk(index, delta, logprobs, usage=usage)
                if event.result is not None:
                    reason = finish_reason(event.result, self._parsers[index].num_calls)
                    yield self._chunk(index, {}, None, reason, usage)
            if options.include_usage:
                last = self._answer("chat.completion.chunk", [])
                last["usage"] = self._usage(generation)
                if metrics := speculation_of(generation.replies, self._detail):
                    last["metrics"] = metrics
                yield data_event(last)
            yield DONE

    @property
    def _detail(self) -> str:
        return self._context.settings.request_metrics

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        if self._ask.params.logprobs is None or not event.logprobs:
            return None
        return chat_logprobs(self._context.tokenizer, event.logprobs)

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        result = generation.replies[index].result
        assert result is not None
        parser = self._parsers[index]
        parts = [*parser.feed(result.text), *parser.close()]
        logprobs = None
        if self._ask.params.logprobs is not None and result.logprobs is not None:
            logprobs = chat_logprobs(self._context.tokenizer, result.logprobs)
        return {
            "index": index,
            "message": self._names.message(parts),
            "logprobs": logprobs,
            "finish_reason": finish_reason(result, parser.num_calls),
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._answer("chat.completion.chunk", [choice])
        if usage is not None:
            chunk["usage"] = usage
        return data_event(chunk)

    def _answer(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
        }

    def _usage(self, generation: Generation) -> dict[str, Any]:
        ask = self._ask
        return usage_of(
            generation.replies, ask.params.n, ask.prediction, ask.thoughts(self._context)
        )


class _Names:
    """Parts of a reply under the names of chat.

    Args:
        old_reasoning: whether thoughts go out as ``reasoning_content`` as well.
    """

    def __init__(self, old_reasoning: bool) -> None:
        self._reasoning = ("reasoning", "reasoning_content") if old_reasoning else ("reasoning",)

    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What a step adds."""
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for part in parts:
            if part.kind == "content":
                delta["content"] = delta.get("content", "") + part.text
            elif part.kind == "reasoning":
                for name in self._reasoning:
                    delta[name] = delta.get(name, "") + part.text
            elif part.kind == "call":
                calls.append(self._call(part.index, part.text))
            else:
                if not calls or calls[-1]["index"] != part.index:
                    calls.append({"index": part.index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += part.text
        if calls:
            delta["tool_calls"] = calls
        return delta

    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        """A whole reply."""
        message: dict[str, Any] = {"role": "assistant", "content": None} | self.delta(parts)
        for call in message.get("tool_calls", []):
            del call["index"]
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return message | {"refusal": None}

    @staticmethod
    def _call(index: int, name: str) -> dict[str, Any]:
        return {
            "index": index,
            "id": new_id("call_"),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
