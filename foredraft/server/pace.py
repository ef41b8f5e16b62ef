"""Streams at an even pace: one token an event, however many a step committed.

The number of tokens an event leaks, to an observer who counts the bytes of an encrypted stream,
which parts of a reply were drafted correctly, and so something about its text (J. Wei et al., arXiv
2411.01076). An even stream is also easier to read. Tokens wait here until it is their turn, at the
mean pace of all that have come so far: at the end of a reply about as many as a step brings.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self, TypeAlias

from foredraft.engine.request import Event

Indexed: TypeAlias = tuple[int, Event]
"""An event with the index of its reply."""

_LONGEST_WAIT = 1.0
"""Most seconds between two waiting tokens."""


class Paced(AsyncIterator[Indexed]):
    """Events of one token each. It must be closed.

    Args:
        source: the events as steps bring them.
        clock: in seconds.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        source: AsyncIterator[Indexed],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self._source, self._clock, self._sleep = source, clock, sleep
        self._waiting: deque[Indexed] = deque()
        self._news = asyncio.Event()
        self._began = self._due = 0.0
        self._num_come, self._largest = 0, 1
        self._reader: asyncio.Task[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Indexed:
        """The next token, or an event without one.

        Raises:
            StopAsyncIteration: all have been handed out.
            Exception: what the source raised, behind the tokens that came before.
        """
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        while not self._waiting:
            if self._reader.done():
                self._reader.result()
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        if self._waiting[0][1].token_ids:
            await self._sleep(max(0.0, self._due - self._clock()))
            # a sleep ends late: make up for it, by less than one interval
            interval = self._interval()
            self._due = max(self._due + interval, self._clock())
        return self._waiting.popleft()

    async def aclose(self) -> None:
        """Read no more."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for index, event in self._source:
                self._num_come += len(event.token_ids)
                self._largest = max(self._largest, len(event.token_ids))
                self._began = self._began or self._clock()
                self._waiting.extend((index, each) for each in by_token(event))
                self._news.set()
        finally:
            self._news.set()

    def _interval(self) -> float:
        """Seconds between two tokens; half of it if more tokens wait than a step brings."""
        mean = (self._clock() - self._began) / max(1, self._num_come)
        behind = len(self._waiting) > 2 * self._largest
        return min(mean / 2.0 if behind else mean, _LONGEST_WAIT)


def by_token(event: Event) -> list[Event]:
    """An event of one token for each of an event's; itself where it has no more than one.

    Text stays in order. A token without text of its own may come with none, and the last one comes
    with the result.
    """
    count = len(event.token_ids)
    if count < 2:
        return [event]
    pieces = event.pieces
    without = event._replace(num_accepted=0, num_drafted=0, result=None, prompt_logprobs=None)
    events = [
        without._replace(
            token_ids=event.token_ids[i : i + 1],
            logprobs=event.logprobs[i : i + 1],
            pieces=pieces[i : i + 1] if i < count - 1 else pieces[i:],
        )
        for i in range(count)
    ]
    events[0] = events[0]._replace(prompt_logprobs=event.prompt_logprobs)
    events[-1] = events[-1]._replace(
        num_accepted=event.num_accepted,
        num_drafted=event.num_drafted,
        result=event.result,
    )
    return events
