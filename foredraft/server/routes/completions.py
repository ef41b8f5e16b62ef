"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.logprobs import TokenLogprobs
from foredraft.engine.events import Event
from foredraft.server.asks import Ask, read_completion
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import given, ignored
from foredraft.server.errors import ApiError
from foredraft.server.finishing import finish_reason
from foredraft.server.generation import Generation
from foredraft.server.logprobs import CompletionLogprobs
from foredraft.server.routes.common import Context, KeyId, new_id, now, respond
from foredraft.server.schemas.common import error_responses, streamed
from foredraft.server.schemas.completions import Completion, CompletionRequest
from foredraft.server.streaming import StreamOptions, stream_options
from foredraft.server.usage import speculation_of, usage_of
from foredraft.server.wire import DONE, data_event

router = APIRouter()


@router.post(
    "/v1/completions",
    responses={200: streamed("continuations, whole or as events", Completion), **error_responses()},
)
async def create_completion(
    body: CompletionRequest, request: Request, context: Context, key_id: KeyId
) -> Response:
    """Continue prompts: text, texts, token ids, or lists of token ids."""
    plain = body.plain()
    echo = bool(given(plain, "echo", False))
    nothing_new = plain.get("max_tokens") == 0
    if nothing_new:
        plain["max_tokens"] = 1  # the engine commits a token at least; it is not shown
    ask = await read_completion(context, plain, key_id)
    work = Completions(context, ask, stream_options(plain), echo, nothing_new)
    return await respond(work, plain, ignored(plain, "completions"), context, request)


class Completions:
    """One completions request, on its way to an answer.

    Args:
        echo: whether texts begin with their prompts.
        nothing_new: whether they end there.
    """

    def __init__(
        self,
        context: ServerContext,
        ask: Ask,
        options: StreamOptions,
        echo: bool,
        nothing_new: bool,
    ) -> None:
        self._context, self._ask, self._options, self._echo = context, ask, options, echo
        self._nothing_new = nothing_new
        self._id, self._created = new_id("cmpl-"), now()
        num_replies = len(ask.prompts) * ask.params.n
        self._logprobs: list[CompletionLogprobs] = []
        if ask.params.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(context.tokenizer, ask.params.logprobs)
                for _ in range(num_replies)
            ]

    async def whole(self) -> dict[str, Any]:
        """The answer when all is there."""
        async with self._ask.open(self._context) as generation:
            async for _ in generation:
                pass
            self._hide(generation)
            choices = [self._choice(index, generation) for index in range(len(generation.replies))]
            answer = self._answer(choices)
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
            yield b""  # accepted
            begun: set[int] = set()
            async for index, event in generation:
                usage = self._usage(generation) if options.continuous_usage else None
                text = "" if self._nothing_new else "".join(piece.text for piece in event.pieces)
                if self._echo and index not in begun and (event.token_ids or event.result):
                    begun.add(index)
                    text = self._prompt_text(index) + text
                logprobs = self._chunk_logprobs(index, event)
                if text or logprobs:
                    yield self._chunk(index, text, logprobs, usage=usage)
                if event.result is not None:
                    reason = "length" if self._nothing_new else finish_reason(event.result)
                    yield self._chunk(index, "", None, reason, usage)
            if options.include_usage:
                self._hide(generation)
                last = self._answer([])
                last["usage"] = self._usage(generation)
                if metrics := speculation_of(generation.replies, self._detail):
                    last["metrics"] = metrics
                yield data_event(last)
            yield DONE

    @property
    def _detail(self) -> str:
        return self._context.settings.request_metrics

    def _prompt(self, index: int) -> list[int]:
        return self._ask.prompts[index // self._ask.params.n]

    def _prompt_text(self, index: int) -> str:
        return self._context.tokenizer.decode(self._prompt(index), skip_special_tokens=False)

    def _hide(self, generation: Generation) -> None:
        """The token that nobody asked for."""
        if not self._nothing_new:
            return
        for reply in generation.replies:
            assert reply.result is not None
            hidden = reply.result.logprobs and ()
            reply.result = replace(
                reply.result, text="", token_ids=(), finish_reason="length", logprobs=hidden
            )
            reply.num_tokens = 0

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        result = generation.replies[index].result
        assert result is not None
        tokens = list(result.token_ids)
        entries: list[TokenLogprobs | None] = [*(result.logprobs or ())]
        text = result.text
        if self._echo:
            text = self._prompt_text(index) + text
            tokens = self._prompt(index) + tokens
            entries = [*(result.prompt_logprobs or ()), *entries]
        logprobs = self._logprobs[index].format(tokens, entries) if self._logprobs else None
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(result),
        }

    def _chunk_logprobs(self, index: int, event: Event) -> dict[str, Any] | None:
        """Of a step; those of an echoed prompt go with the first tokens, as its text does."""
        if not self._logprobs:
            return None
        tokens: list[int] = []
        entries: list[TokenLogprobs | None] = []
        if self._echo and event.prompt_logprobs is not None:
            tokens += self._prompt(index)
            entries += event.prompt_logprobs
        if not self._nothing_new:
            tokens += event.token_ids
            entries += event.logprobs
        return self._logprobs[index].format(tokens, entries) if tokens else None

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._answer([choice])
        if usage is not None:
            chunk["usage"] = usage
        return data_event(chunk)

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
        }

    def _usage(self, generation: Generation) -> dict[str, Any]:
        return usage_of(generation.replies, self._ask.params.n, self._ask.prediction)
