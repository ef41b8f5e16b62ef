"""Targets and drafters that keep the time their calls take; the step itself stays clean."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from foredraft.core.proposal import Proposal
from foredraft.drafters.base import Drafter, DraftRow, Observation
from foredraft.models.base import RowScores, ScoreRow, Target


class Stopwatch:
    """Adds up the seconds of its ``with`` blocks, work queued on a GPU included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._started


class TimedTarget:
    """A target whose `score` is timed; everything else is the target's own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.watch = Stopwatch()

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> list[RowScores]:
        with self.watch:
            return self._target.score(rows, taps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class TimedDrafter:
    """A drafter whose every call is timed."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.watch = Stopwatch()

    @property
    def taps(self) -> Sequence[int]:
        return self._drafter.taps

    def begin(self, request_id: int, prompt: Sequence[int]) -> None:
        with self.watch:
            self._drafter.begin(request_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        with self.watch:
            return self._drafter.propose(rows)

    def observe(self, observations: Sequence[Observation]) -> None:
        with self.watch:
            self._drafter.observe(observations)

    def end(self, request_id: int) -> None:
        with self.watch:
            self._drafter.end(request_id)
