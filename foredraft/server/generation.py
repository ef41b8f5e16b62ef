"""The replies of one HTTP request while the engine generates them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from foredraft.core.params import SamplingParams
from foredraft.engine.engine import check_ids, context_holds
from foredraft.engine.request import Event, GenerationResult
from foredraft.server.engine import ServedEngine, ServedModel, ServedReplies
from foredraft.server.errors import ApiError
from foredraft.server.pace import Paced
from foredraft.server.resume import StreamPlace


@dataclass
class ReplyState:
    """The state of one reply so far.

    Attributes:
        num_prompt_tokens: of its prompt.
        num_tokens: committed by now.
        accepted: draft tokens accepted, by step that brought it something.
        drafted: draft tokens verified, by step that brought it something.
        arrived: when steps brought it something, in seconds of `time.perf_counter`.
        result: at its end.
    """

    num_prompt_tokens: int
    num_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    result: GenerationResult | None = None

    def add(self, event: Event) -> None:
        if event.token_ids:
            self.num_tokens += len(event.token_ids)
            self.accepted.append(event.num_accepted)
            self.drafted.append(event.num_drafted)
            self.arrived.append(time.perf_counter())
        self.result = event.result


class Generation:
    """The events of one or more replies, in the order in which they come. Made by `open`.

    It must be closed. That ends unfinished replies within one step.

    Attributes:
        replies: by index: prompts one after the other, n to each.
        num_prompt_tokens: of all prompts, each counted once.
        began: when it was asked for, in seconds of `time.perf_counter`.
    """

    def __init__(
        self, stream: ServedReplies, prompt_sizes: Sequence[int], n: int, began: float
    ) -> None:
        self._stream = stream
        self._indices = {number: index for index, number in enumerate(stream.request_ids)}
        self.replies = [ReplyState(size) for size in prompt_sizes for _ in range(n)]
        self.num_prompt_tokens = sum(prompt_sizes)
        self.began = began
        self._error: ApiError | None = None
        self._is_late = False
        self._num_open = len(self.replies)
        self._paced: Paced | None = None
        self._place: StreamPlace | None = None
        self._cut: deque[Event] = deque()

    @classmethod
    async def open(
        cls,
        engine: ServedEngine,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        tenant: str | None,
        priority: int,
        session: str | None = None,
        *,
        scores_only: bool = False,
        arrived: float | None = None,
    ) -> Generation:
        """Submit all prompts, or none of them.

        Args:
            scores_only: no reply is wanted: the log probabilities of a prompt's last token are
                reported as those of its reply.
            arrived: when the request came; None: now.

        Raises:
            QueueFullError, EngineStoppedError, PromptError, ConfigError: as
                `ServedEngine.open_all`.
        """
        began = time.perf_counter() if arrived is None else arrived
        asked = [
            _scoring(engine.llm, prompt, params) if scores_only else (prompt, params)
            for prompt in prompts
        ]
        stream = await engine.open_all(asked, tenant=tenant, priority=priority, session=session)
        return cls(stream, [len(prompt) for prompt in prompts], params.n, began)

    def pace(self) -> None:
        """From now on events come with one token each, at an even pace."""
        self._paced = Paced(self._steps())

    def follow(self, place: StreamPlace) -> None:
        """From now on events are cut where the client of a broken stream stopped reading."""
        self._place = place

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, Event]:
        """The index of a reply, and its next event.

        Raises:
            ApiError: a reply failed, or the server ended it early (`abort`).
        """
        if self._place is None:
            return await (self._next() if self._paced is None else self._paced.next())
        while not self._cut:
            self._cut.extend(self._place.cut((await self._next())[1]))
        self._place.took(event := self._cut.popleft())
        return 0, event

    async def _steps(self) -> AsyncIterator[tuple[int, Event]]:
        """Events, one for each step."""
        while True:
            try:
                yield await self._next()
            except StopAsyncIteration:
                return

    async def _next(self) -> tuple[int, Event]:
        if not self._num_open:
            raise StopAsyncIteration
        try:
            event = await anext(self._stream)
        except StopAsyncIteration:
            raise self._ended from None
        if self._is_late:
            event = _as_long_as_it_is(event)
        index = self._indices[event.request_id]
        self.replies[index].add(event)
        if event.result is not None:
            self._num_open -= 1
            self._check(event.result)
        return index, event

    async def aclose(self) -> None:
        """End unfinished replies. It never waits."""
        await self._stream.aclose()
        if self._paced is not None:
            await self._paced.aclose()

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


def _as_long_as_it_is(event: Event) -> Event:
    """The end of a reply whose time was over: it keeps its text."""
    result = event.result
    if result is None or result.finish_reason != "cancelled" or not result.token_ids:
        return event
    return event._replace(result=replace(result, finish_reason="length"))


def _scoring(
    model: ServedModel, prompt: list[int], params: SamplingParams
) -> tuple[list[int], SamplingParams]:
    """The prompt and parameters that score a prompt: its last token is generated.

    The engine generates at least one token. Generating the last token of the prompt, as the only
    one allowed, lets the prompt fill the context. A prompt of one token is kept whole; the token
    that is generated after it is not shown.

    Raises:
        PromptError: the prompt is longer than the context, or its last token is no id.
    """
    limit = model.max_context
    check_ids(prompt, model.vocab_size, limit, context_holds(limit))
    *start, last = prompt
    if not start:
        return prompt, params
    return start, SamplingParams(
        max_tokens=1,
        n=params.n,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        allowed_token_ids=[last],
    )


def finish_reason(result: GenerationResult, num_calls: int = 0) -> str:
    """OpenAI's ``finish_reason`` of a reply that came to its end."""
    if num_calls and result.finish_reason == "stop":
        return "tool_calls"
    return result.finish_reason
