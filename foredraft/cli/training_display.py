"""Display of training: the current stage and the remaining time; lines in a log."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from rich.console import Console

from foredraft.cli.display import RichProgress, interruptible

if TYPE_CHECKING:
    from foredraft.train.progress import Status

_LINE_EVERY_S = 30.0


class TrainingDisplay(RichProgress):
    """A `foredraft.train.progress.Monitor`; Ctrl-C and SIGTERM end the work at hand.

    Args:
        pause: called before each piece of work; returns when it may begin.
        ends_at: when the whole run is to be over (`time.monotonic`); None: that is not known.
    """

    def __init__(
        self, console: Console, pause: Callable[[], object], ends_at: float | None = None
    ) -> None:
        super().__init__(console, _LINE_EVERY_S)
        self.pause, self._ends_at = pause, ends_at
        self._pressed: list[int] = []
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        said = "stopping after the piece of work at hand; again to stop at once"
        asked = interruptible(lambda: self.say(said), (signal.SIGINT, signal.SIGTERM))
        self._pressed = self._signals.enter_context(asked)
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._signals.close()

    def stage(self, text: str) -> None:
        """A new piece of work begins, unless it is the one at hand."""
        if text != self._stage:
            super().stage(text)

    def advance(self, fraction: float, detail: str = "") -> None:
        """The share of it that is done, and how long is left."""
        if self._ends_at is not None:
            detail = detail or f"{duration(self._ends_at - time.monotonic())} left of the whole run"
        super().advance(fraction, detail)

    def step(self, status: Status) -> None:
        self.stage("Learning")
        overlap = " ".join(f"{share:.2f}" for share in status.overlap)
        left = duration(status.left_s) if status.left_s < 1e6 else "…"
        speed = f"{status.tokens_per_s:.0f} tokens/s"
        detail = f"loss {status.loss:.3f}, overlap {overlap}, {speed}, {left} left"
        self.advance(status.done, detail)

    def evaluated(self, status: Status) -> None:
        from foredraft.train.folder import describe_measured

        assert status.acceptance is not None
        self.say(f"{status.tokens:>11,} tokens: {describe_measured(status.acceptance.as_dict())}")

    def wants_stop(self) -> bool:
        return bool(self._pressed)


def duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
