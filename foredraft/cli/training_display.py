"""How training is shown: a bar with loss, acceptance and rest; lines in a log."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.progress import TaskProgressColumn as PercentColumn

if TYPE_CHECKING:
    from foredraft.train.plan import Status

_LINE_EVERY_S = 30.0


class TrainingDisplay:
    """A `foredraft.train.plan.Monitor`: Ctrl-C and SIGTERM end training after the step at hand."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._said_at = -_LINE_EVERY_S
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
        self._close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def stage(self, text: str) -> None:
        """A new piece of work begins."""
        self._open(text)

    def advance(self, fraction: float) -> None:
        """The share of it that is done."""
        self._update("", fraction)

    def step(self, status: Status) -> None:
        """After each step."""
        self._open("Training")
        self._update(_describe(status), status.done)
        if not self._console.is_terminal and time.monotonic() - self._said_at > _LINE_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"{status.done:.1%} {_describe(status)}")

    def evaluated(self, status: Status) -> None:
        """After each measurement."""
        from foredraft.train.acceptance import describe

        assert status.acceptance is not None
        self._say(f"{status.tokens:>11,} tokens: {describe(status.acceptance.as_dict())}")

    def wants_stop(self) -> bool:
        return self._stop

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        self._say("stopping after this step; again to stop at once")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _open(self, text: str) -> None:
        if not self._console.is_terminal:
            if text != "Training":
                self._say(f"{text} …")
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
        if self._task is None or self._progress.tasks[-1].description != text:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(text, total=1.0, detail="")

    def _update(self, detail: str, fraction: float) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=min(fraction, 1.0), detail=detail)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None


def _describe(status: Status) -> str:
    overlap = " ".join(f"{share:.2f}" for share in status.overlap)
    left = time.strftime("%H:%M:%S", time.gmtime(status.left_s)) if status.left_s < 8e4 else "…"
    speed = f"{status.tokens_per_s:.0f} tokens/s"
    return f"loss {status.loss:.3f}, overlap {overlap}, {speed}, {left} left"
