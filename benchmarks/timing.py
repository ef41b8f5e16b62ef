"""Clocks, and figures that are taken in turns so that a slow moment of the machine hits all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

_S = TypeVar("_S")


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


class PeerFailed(Exception):  # noqa: N818 - a result, not a mistake
    """Another engine gave no answer. The message says why, in a few words for a table."""


@dataclass(kw_only=True)
class Figure(Generic[_S]):
    """Measurements of one contender at one point.

    Attributes:
        failure: why there is no figure; None: there is one.
    """

    samples: list[_S] = field(default_factory=list)
    failure: str | None = None


_F = TypeVar("_F", bound=Figure)  # type: ignore[type-arg]


def take_turns(
    figures: Sequence[_F],
    rounds: int,
    sample: Callable[[_F], object],
    advance: Callable[[], None],
) -> None:
    """Sample each figure once a round. The first round warms up and is not kept.

    A figure whose contender fails is not sampled again.
    """
    for number in range(rounds + 1):
        for figure in figures:
            if figure.failure is not None:
                continue
            try:
                found = sample(figure)
            except PeerFailed as reason:
                figure.failure = str(reason)
                continue
            if number:
                figure.samples.append(found)
        advance()
