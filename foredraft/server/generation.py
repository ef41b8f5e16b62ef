"""A generation request, and its replies while the engine generates them."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from foredraft.core.params import SamplingParams
from foredraft.engine.request import Event, GenerationResult
from foredraft.server.engine import ServedReplies
from foredraft.server.errors import ApiError
from foredraft.server.formats.base import Format
from foredraft.server.replies import ReplyParser
from foredraft.server.resume import StreamPlace
from foredraft.server.tools import NO_TOOLS, ToolUse

_log = logging.getLogger("foredraft.server.reading")
_LONG = 5.0
"""Seconds of prefill after which it is logged."""


@dataclass(frozen=True)
class GenerationRequest:
    """The generation that one HTTP request asks for.

    Attributes:
        operation: what kind of request it is, as OpenTelemetry's conventions call it.
        model: the name to answer with.
        prompts: token ids of each prompt.
        params: of every reply; ``n`` replies to each prompt.
        tenant: the owner of the request.
        priority: requests of higher numbers go first.
        session: see `ServedEngine.open_all`.
        arrived: when it came, in seconds of `time.perf_counter`.
        names: by sampling parameter the field that it came from.
        model_defaults: sampling parameters that the model's makers name, where the request does
            not.
        ignored: fields without effect here.
        form: the model's form of thoughts and calls.
        prediction: how often each id is in the text that a reply is expected to repeat.
        tools: that a reply may call.
        thinks: whether a reply may begin with thoughts.
        in_thoughts: whether the prompt has opened them.
        scores_only: whether the prompts are only scored: the one token of each reply is not shown.
        place: in the stream of one reply; None: it cannot be resumed.
        headers: of the HTTP request.
        reply_id: a part of the ids of the answer.
    """

    operation: Literal["chat", "text_completion"]
    model: str
    prompts: tuple[list[int], ...]
    params: SamplingParams
    tenant: str | None
    priority: int
    session: str | None
    arrived: float
    names: Mapping[str, str] = field(default_factory=dict)
    model_defaults: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    form: Format = field(default_factory=Format)
    prediction: Counter[int] = field(default_factory=Counter)
    tools: ToolUse = NO_TOOLS
    thinks: bool = False
    in_thoughts: bool = False
    scores_only: bool = False
    place: StreamPlace | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def reply_id(self) -> str:
        return secrets.token_hex(12) if self.place is None else self.place.now.reply_id

    def new_parser(self) -> ReplyParser:
        tools, is_one = self.tools.tools, not self.tools.parallel
        return ReplyParser(self.form, tools, self.thinks, self.in_thoughts, is_one)


@dataclass
class ReplyState:
    """The state of one reply so far.

    Attributes:
        num_prompt_tokens: of its prompt.
        num_tokens: committed by now.
        accepted: draft tokens accepted, for each step that committed tokens.
        drafted: draft tokens verified, for each of these steps.
        arrived: the times of these steps, in seconds of `time.perf_counter`.
        logs_at: when to log that its prompt is still being prefilled; infinity: it is logged.
        result: at its end.
    """

    num_prompt_tokens: int
    num_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    logs_at: float | None = None
    result: GenerationResult | None = None

    def add(self, event: Event) -> None:
        if event.token_ids:
            self.num_tokens += len(event.token_ids)
            self.accepted.append(event.num_accepted)
            self.drafted.append(sum(count for _, count in event.drafts))
            self.arrived.append(time.perf_counter())
        self.result = event.result


class Generation:
    """The events of one or more replies, in the order in which they come.

    It must be closed. That ends unfinished replies within one step.

    Args:
        stream: of the engine.
        request: events of a resumed one are cut where its client stopped reading.

    Attributes:
        replies: by index: prompts one after the other, n to each.
        num_prompt_tokens: of all prompts, each counted once.
        began: when it was asked for, in seconds of `time.perf_counter`.
    """

    def __init__(self, stream: ServedReplies, request: GenerationRequest) -> None:
        self._stream, self._place, self._request = stream, request.place, request
        self._indices = {number: index for index, number in enumerate(stream.request_ids)}
        sizes = [len(prompt) for prompt in request.prompts]
        self.replies = [ReplyState(size) for size in sizes for _ in range(request.params.n)]
        self.num_prompt_tokens = sum(sizes)
        self.began = request.arrived
        self._error: ApiError | None = None
        self._is_late = False
        self._num_open = len(self.replies)
        self._num_events, self._progress, self._moved = 0, (-1, 0), 0.0

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """The index of a reply and its next event, as long as there are any.

        Raises:
            ApiError: a reply failed, or the server ended it early (`abort`).
        """
        events = self._events()
        return events if self._place is None else self._place.follow(events)

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        while self._num_open:
            try:
                event = await anext(self._stream)
            except StopAsyncIteration:
                raise self._ended from None
            result = event.result if self._is_late else None
            if result and result.token_ids and result.finish_reason == "cancelled":
                event = event._replace(result=replace(result, finish_reason="length"))
            index = self._indices[event.request_id]
            self._num_events += 1
            self._log_reading(self.replies[index], event)
            self.replies[index].add(event)
            if event.result is not None:
                self._num_open -= 1
                self._check(event.result)
            yield index, event

    def timed_from(self, num_steps: int) -> float:
        """The start of the time-out of its replies, in seconds of `time.perf_counter`.

        It is the first token of the reply that began last; while one has not begun, the last call
        that found progress, of the engine or of its replies.

        Args:
            num_steps: of the engine so far.
        """
        if all(reply.arrived or reply.result for reply in self.replies):
            return max([self.began, *(at for reply in self.replies for at in reply.arrived[:1])])
        if (progress := (num_steps, self._num_events)) != self._progress:
            self._progress, self._moved = progress, time.perf_counter()
        return self._moved

    def _log_reading(self, reply: ReplyState, event: Event) -> None:
        """Log once that a prompt takes long to read, and once that it is read."""
        now, is_read = time.perf_counter(), bool(event.token_ids)
        if reply.arrived:
            return
        if reply.logs_at is None:
            reply.logs_at = now + _LONG
        elif reply.logs_at == math.inf if is_read else now >= reply.logs_at:
            reply.logs_at = math.inf
            text = "%s: %d of %d tokens of the prompt are read, %.0f s after the request"
            counts = event.num_prompt_read, reply.num_prompt_tokens
            _log.info(text, self._request.reply_id, *counts, now - self.began)

    async def aclose(self) -> None:
        """End unfinished replies. It never waits."""
        await self._stream.aclose()

    async def abort(self, error: ApiError) -> None:
        """End all replies early. The reader gets ``error``."""
        self._error = self._error or error
        await self._stream.aclose()

    async def expire(self, error: ApiError) -> None:
        """End all replies early, as ones that are long enough. The reader of a reply without any
        token gets ``error``."""
        self._error, self._is_late = self._error or error, True
        await self._stream.cut()

    @property
    def _ended(self) -> ApiError:
        return self._error or ApiError(503, "the reply was ended", code="cancelled")

    def _check(self, result: GenerationResult) -> None:
        if result.finish_reason == "cancelled":
            raise self._ended
        if result.error_code is not None:  # the request's own rules
            text = f"the reply ends after {len(result.token_ids)} tokens: {result.error}"
            raise ApiError(400, text, param=result.error_field, code=result.error_code)
        if result.finish_reason == "error":
            raise ApiError(500, f"the reply failed: {result.error}", code="generation_failed")


def finish_reason(result: GenerationResult, num_calls: int = 0) -> str:
    """OpenAI's ``finish_reason`` of a reply that came to its end."""
    if num_calls and result.finish_reason == "stop":
        return "tool_calls"
    return result.finish_reason
