"""Slow work shown on the terminal: a bar that comes and goes, or plain lines in a log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import TaskProgressColumn as PercentColumn

if TYPE_CHECKING:
    from foredraft.engine.engine import Event


class RichProgress:
    """Shows the stages of slow work on stderr; a `foredraft.models.files.progress.Progress`.

    On a terminal each stage is a line with a spinner, and a bar as soon as its share is known; the
    line disappears on exit. Anywhere else a stage is one printed line and shares are left out.

    Args:
        console: where to draw; stderr by default, so that stdout stays clean.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def stage(self, text: str) -> None:
        """A new piece of work begins."""
        if not self._console.is_terminal:
            self._console.print(f"{text} …", markup=False, highlight=False, soft_wrap=True)
            return
        progress = self._display()
        if self._task is not None:
            progress.remove_task(self._task)
        self._task = progress.add_task(text, total=None)

    def advance(self, fraction: float) -> None:
        """The share of the current stage that is done, 0 to 1."""
        if self._progress is not None and self._task is not None:
            share = min(max(fraction, 0.0), 1.0)
            self._progress.update(self._task, total=1.0, completed=share)

    def _display(self) -> Progress:
        """Started by the first stage: nothing slow, nothing drawn."""
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                PercentColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        return self._progress


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar over ``total`` pieces of work; call what it yields with a name after each piece."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


class PromptProgress:
    """Says on a terminal that a long prompt is being read, from a second on until text comes.

    Args:
        num_tokens: of the prompt, when that is known.
        console: where to draw; stderr by default.
        delay_s: nothing is drawn before.
    """

    def __init__(
        self, num_tokens: int | None = None, console: Console | None = None, delay_s: float = 1.0
    ) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            *((BarColumn(), MofNCompleteColumn()) if num_tokens else ()),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("reading the prompt", total=num_tokens)
        self._timer = threading.Timer(delay_s, self._progress.start)
        self._timer.daemon = True

    def __enter__(self) -> PromptProgress:
        if self._console.is_terminal:
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def show(self, event: Event) -> None:
        """Count what has been read; away as soon as there is text."""
        if event.token_ids or event.result is not None:
            self.stop()
        else:
            self._progress.update(self._task, completed=event.num_prompt_read)

    def stop(self) -> None:
        """Take it off the screen, if it is there, and keep it from coming."""
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()
        self._progress.stop()
