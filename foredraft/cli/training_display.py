"""Display of training: the current stage and the remaining time; lines in a log."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from foredraft.cli.display import RichProgress

if TYPE_CHECKING:
    from foredraft.train.progress import Status

_LINE_EVERY_S = 30.0
_LEARNING = "Learning"


class TrainingDisplay(RichProgress):
    """A `foredraft.train.progress.Monitor`; Ctrl-C and SIGTERM end the work at hand.

    Args:
        console: where to draw.
        pause: called before each piece of work; returns when it may begin.
        ends_at: when the whole run is to be over (`time.monotonic`); None: that is not known.
    """

    def __init__(
        self, console: Console, pause: Callable[[], object], ends_at: float | None = None
    ) -> None:
        super().__init__(console, log_every_s=_LINE_EVERY_S)
        self.pause, self._ends_at = pause, ends_at
        self._stage_began = 0.0
        self._stop = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._handlers[number] = signal.signal(number, self._ask_to_stop)
            except ValueError:  # not in the main thread
                continue
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def stage(self, text: str) -> None:
        """A new piece of work begins, unless it is the one at hand."""
        if text != self._stage:
            self._stage_began = time.monotonic()
            super().stage(text)

    def advance(self, fraction: float, detail: str = "") -> None:
        """The share of it that is done, and how long is left."""
        now = time.monotonic()
        if self._ends_at is not None:
            detail = detail or f"{duration(self._ends_at - now)} left of the whole run"
        elif 0 < fraction < 1:
            left = (now - self._stage_began) * (1 / fraction - 1)
            detail = detail or f"{duration(left)} left"
        super().advance(fraction, detail)

    def step(self, status: Status) -> None:
        """After each step."""
        self.stage(_LEARNING)
        overlap = " ".join(f"{share:.2f}" for share in status.overlap)
        left = duration(status.left_s) if status.left_s < 1e6 else "…"
        speed = f"{status.tokens_per_s:.0f} tokens/s"
        detail = f"loss {status.loss:.3f}, overlap {overlap}, {speed}, {left} left"
        self.advance(status.done, detail)

    def evaluated(self, status: Status) -> None:
        """After each measurement."""
        from foredraft.train.folder import describe_measured

        assert status.acceptance is not None
        self.say(f"{status.tokens:>11,} tokens: {describe_measured(status.acceptance.as_dict())}")

    def wants_stop(self) -> bool:
        """Whether a signal has asked for it."""
        return self._stop

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        self.say("stopping after the piece of work at hand; again to stop at once")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
