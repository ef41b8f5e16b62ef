"""How training is shown: what is being done, how long is left; lines in a log."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.progress import TaskProgressColumn as PercentColumn

if TYPE_CHECKING:
    from foredraft.train.progress import Status

_LINE_EVERY_S = 30.0
_LEARNING = "Learning"


class TrainingDisplay:
    """A `foredraft.train.progress.Monitor`; Ctrl-C and SIGTERM end the work at hand.

    Args:
        console: where to draw.
        pause: called before each piece of work; returns when it may begin.
        ends_at: when the whole run is to be over (`time.monotonic`); None: that is not known.
    """

    def __init__(
        self, console: Console, pause: Callable[[], object], ends_at: float | None = None
    ) -> None:
        self._console, self.pause, self._ends_at = console, pause, ends_at
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage, self._stage_began, self._line_at = "", 0.0, 0.0
        self._stop = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> TrainingDisplay:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._handlers[number] = signal.signal(number, self._ask_to_stop)
            except ValueError:  # not in the main thread
                continue
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def stage(self, text: str) -> None:
        """A new piece of work begins."""
        if text != self._stage:
            self._begin(text)

    def advance(self, fraction: float) -> None:
        """The share of it that is done."""
        fraction = min(fraction, 1.0)
        now = time.monotonic()
        if self._ends_at is not None:
            detail = f"{duration(self._ends_at - now)} left of the whole run"
        else:
            left = (now - self._stage_began) * (1 / fraction - 1) if fraction > 0 else 0.0
            detail = f"{duration(left)} left" if left else ""
        self._show(fraction, detail)

    def step(self, status: Status) -> None:
        """After each step."""
        self.stage(_LEARNING)
        self._show(status.done, _described(status))

    def evaluated(self, status: Status) -> None:
        """After each measurement."""
        from foredraft.train.folder import describe_measured

        assert status.acceptance is not None
        self.say(f"{status.tokens:>11,} tokens: {describe_measured(status.acceptance.as_dict())}")

    def wants_stop(self) -> bool:
        """Whether a signal has asked for it."""
        return self._stop

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        self.say("stopping after the piece of work at hand; again to stop at once")

    def _begin(self, text: str) -> None:
        self._stage, self._stage_began = text, time.monotonic()
        self._line_at = self._stage_began + _LINE_EVERY_S
        if not self._console.is_terminal:
            self.say(f"{text} …")
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                PercentColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=1.0, detail="")

    def _show(self, fraction: float, detail: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=min(fraction, 1.0), detail=detail)
        elif time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + _LINE_EVERY_S
            self.say(f"{self._stage}: {fraction:.1%}, {detail}")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _described(status: Status) -> str:
    overlap = " ".join(f"{share:.2f}" for share in status.overlap)
    left = duration(status.left_s) if status.left_s < 1e6 else "…"
    speed = f"{status.tokens_per_s:.0f} tokens/s"
    return f"loss {status.loss:.3f}, overlap {overlap}, {speed}, {left} left"
