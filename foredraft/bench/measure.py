"""How long a generation took, without the time its reader spent on showing it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import cast

from foredraft.engine.request import Event, GenerationResult


@dataclass(frozen=True)
class MeasuredRun:
    """A finished generation and its times in seconds.

    Attributes:
        first_event_s: until the first tokens: reading the prompt and one step.
        total_s: all of it.
        num_first: tokens of the first event.
    """

    result: GenerationResult
    first_event_s: float
    total_s: float
    num_first: int

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first event over the time after it."""
        seconds = self.total_s - self.first_event_s
        return (len(self.result.token_ids) - self.num_first) / seconds if seconds > 0 else 0.0

    @property
    def sha256(self) -> str:
        """Digest of the text: equal for two runs exactly when the texts are."""
        return hashlib.sha256(self.result.text.encode()).hexdigest()


def measure(
    events: Iterator[Event], show: Callable[[Event], object] = lambda event: None
) -> MeasuredRun:
    """Run one request's events to their end; only the time inside the engine counts.

    Args:
        events: of one request, as from `LLM.stream`.
    """
    run = measuring(events)
    while True:
        try:
            event = next(run)
        except StopIteration as end:
            return cast(MeasuredRun, end.value)
        show(event)


def measuring(events: Iterator[Event]) -> Generator[Event, None, MeasuredRun]:
    """The same, with a pause behind each event."""
    total_s = first_s = 0.0
    num_first = 0
    result: GenerationResult | None = None
    while result is None:
        started = time.perf_counter()
        event = next(events)
        total_s += time.perf_counter() - started
        if not num_first and event.token_ids:
            first_s, num_first = total_s, len(event.token_ids)
        yield event
        result = event.result
    return MeasuredRun(result, first_s, total_s, num_first)
