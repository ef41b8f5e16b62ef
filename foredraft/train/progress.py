"""Progress of a training run, and the monitor that may pause or stop it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foredraft.models.files.progress import Progress

if TYPE_CHECKING:
    from foredraft.train.acceptance import HeldOutAcceptance


ENOUGH_STEPS = 200
"""Learnt steps below which a head is worth little."""


@dataclass(frozen=True)
class Status:
    """The state of a training run.

    Attributes:
        done: share of the learning.
        tokens: learnt from, over all resumptions.
        seconds: of learning, over all resumptions.
        loss: of the last steps.
        overlap: by depth, of the last steps.
        tokens_per_s: of learning.
        left_s: estimated seconds until the end of the run, measuring included.
        acceptance: at the last evaluation.
    """

    done: float
    tokens: int
    seconds: float
    loss: float
    overlap: tuple[float, ...]
    tokens_per_s: float
    left_s: float
    acceptance: HeldOutAcceptance | None


class Monitor(Progress, Protocol):
    """Shows how training goes, makes it stand still, and ends it."""

    def step(self, status: Status) -> None:
        """Called after each step."""

    def evaluated(self, status: Status) -> None:
        """Called after each measurement."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def wants_stop(self) -> bool:
        """Whether training is to end now, to go on another time."""

    def pause(self) -> object:
        """Called before each piece of work; returns when it may begin."""


def expected(status: Status, num_steps: int, now: float) -> str:
    """A line about the pace of a run and its end.

    Args:
        num_steps: learnt so far, over all resumptions.
        now: seconds since the epoch.
    """
    all_steps = num_steps / max(status.done, 1e-9)
    end = time.strftime("%H:%M", time.localtime(now + min(status.left_s, 1e9)))
    pace = f"{status.tokens_per_s:.0f} tokens a second"
    line = f"{pace}: about {all_steps:.0f} steps in all, until {end}"
    if all_steps >= ENOUGH_STEPS:
        return line
    minutes = math.ceil(status.seconds / max(1, num_steps) * ENOUGH_STEPS / 60)
    return (
        f"{line}. Fewer than {ENOUGH_STEPS} steps teach a head too little; they take {minutes} "
        "minutes of learning here, beside writing and reading the text"
    )


_EVERY_S = 10.0
"""Seconds of steps that means are of."""


class Recent:
    """Means over the last steps."""

    def __init__(self) -> None:
        self.loss, self.tokens_per_s = math.nan, 0.0
        self.overlap: tuple[float, ...] = ()
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic()
        self._losses: list[float] = []
        self._overlaps: list[list[float]] = []
        self._tokens, self._seconds = 0, 0.0

    def add(self, loss: float, overlap: list[float], tokens: int, seconds: float) -> None:
        self._losses.append(loss)
        self._overlaps.append(overlap)
        self._tokens += tokens
        self._seconds += seconds
        num = len(self._losses)
        self.loss = sum(self._losses) / num
        depths = zip(*self._overlaps, strict=False)  # the first depth alone, for a while
        self.overlap = tuple(round(sum(each) / num, 4) for each in depths)
        self.tokens_per_s = self._tokens / max(1e-9, self._seconds)

    def is_due(self) -> bool:
        return time.monotonic() - self._began >= _EVERY_S
