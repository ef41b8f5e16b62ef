"""Terminal output shared by commands: marked drafted text, progress, and Ctrl-C."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from rich.cells import cell_len
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
from rich.text import Text

if TYPE_CHECKING:
    from foredraft.core.record import SpeculationStats
    from foredraft.engine.request import Event
    from foredraft.engine.text import Piece
    from foredraft.llm import LLM

LINE_EVERY_S = 10.0
"""Seconds between two lines on a prompt that is being read, off a terminal."""
DRAFTED = "underline green"
"""Accepted draft tokens: the underline tells them apart without colour, too."""


def say(text: str, *, stderr: bool = False, style: str | None = None) -> None:
    """Print a line verbatim: no markup, highlighting or wrapping."""
    console = Console(stderr=stderr, highlight=False)
    console.print(text, style=style, markup=False, soft_wrap=True)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def show_pieces(console: Console, pieces: Iterable[Piece]) -> None:
    """Print final pieces of text."""
    for piece in pieces:
        style = DRAFTED if piece.drafted else ""
        console.print(Text(piece.text, style=style), end="", soft_wrap=True, highlight=False)


class WholeWords:
    """Shows pieces of text word by word, and begins a line where a word would cross the edge.

    A word is held back until the space behind it has come.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._column = console, 0
        self._word: list[Piece] = []

    def show(self, pieces: Iterable[Piece], is_last: bool = False) -> None:
        for piece in pieces:
            for part in re.findall(r"\s+|\S+", piece.text):
                if part.isspace():
                    self._end_word()
                    self._print([replace(piece, text=part)])
                else:
                    self._word.append(replace(piece, text=part))
        if is_last:
            self._end_word()

    def _end_word(self) -> None:
        width = sum(cell_len(piece.text) for piece in self._word)
        if self._column and self._column + width > self._console.width:
            self._console.print()
            self._column = 0
        self._print(self._word)
        self._word = []

    def _print(self, pieces: list[Piece]) -> None:
        show_pieces(self._console, pieces)
        for piece in pieces:
            _, newline, rest = piece.text.rpartition("\n")
            self._column = cell_len(rest) + (0 if newline else self._column)


def legend() -> Text:
    """One line that says what the underline means."""
    return Text.assemble(
        ("underlined", DRAFTED), (": drafted and accepted; the rest is the target's own", "dim")
    )


def stats_line(stats: SpeculationStats, tokens_per_s: float) -> Text:
    """One line of what speculation did, and why it did little where it did."""
    words = f"{stats.committed} tokens in {stats.steps} steps, {tokens_per_s:.1f} tokens/s"
    if stats.drafted:
        words += (
            f"; {drafted_by(stats)} drafted {stats.drafted}: {stats.accepted} accepted, "
            f"{stats.rejected} rejected, {stats.discarded} past the stop; "
            f"{stats.committed_per_step:.2f} committed per step"
        )
    if stats.plain_reason is not None and 2 * sum(stats.plain_steps.values()) > stats.steps > 1:
        words += f"; {'little' if stats.drafted else 'nothing'} was drafted: {stats.plain_reason}"
    return Text(words, style="dim")


def drafted_by(stats: SpeculationStats) -> str:
    """The names of those that drafted, the one of most tokens first."""
    return ", ".join(sorted(stats.drafters, key=lambda name: -stats.drafters[name])) or "-"


class RichProgress:
    """Shows the stages of slow work on stderr; a `foredraft.models.files.progress.Progress`.

    On a terminal each stage is a line with a spinner, and a bar as soon as its share is known; the
    line disappears on exit. Anywhere else a stage is one printed line.

    Args:
        console: where to draw; stderr by default, so that stdout stays clean.
        waiting: a stage that begins by itself if none has begun in time.
        delay_s: the time after which it begins.
        log_every_s: off a terminal, the time between two lines that say which share of a stage is
            done.
    """

    def __init__(
        self,
        console: Console | None = None,
        waiting: str | None = None,
        delay_s: float = 1.0,
        log_every_s: float = math.inf,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._log_every_s, self._next_line_at = log_every_s, math.inf
        self._waiting, self._lock = waiting, threading.Lock()
        self._timer = threading.Timer(delay_s, self._begin_waiting)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self._waiting is not None:
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the display off the screen, if it is there."""
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def stage(self, text: str) -> None:
        """A new piece of work begins."""
        with self._lock:
            self._begin(text)

    def advance(self, fraction: float, detail: str = "") -> None:
        """Set the finished share of the current stage, 0 to 1, and the text beside it."""
        share = min(max(fraction, 0.0), 1.0)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=1.0, completed=share, detail=detail)
        elif time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + self._log_every_s
            self.say(f"{self._stage}: {share:.1%}, {detail}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _begin_waiting(self) -> None:
        with self._lock:
            if self._waiting is not None and self._stage is None:
                self._begin(self._waiting)

    def _begin(self, text: str) -> None:
        self._stage, self._next_line_at = text, time.monotonic() + self._log_every_s
        if not self._console.is_terminal:
            self.say(f"{text} …")
            return
        progress = self._display()
        if self._task is not None:
            progress.remove_task(self._task)
        self._task = progress.add_task(text, total=None, detail="")

    def _display(self) -> Progress:
        """Started by the first stage: nothing slow, nothing drawn."""
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                PercentColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        return self._progress


class PromptProgress(RichProgress):
    """Shows the prefill of a long prompt until text comes; off a terminal, by a line now and then.

    Args:
        num_tokens: of the prompt, when that is known.
        console: where to draw; stderr by default.
        delay_s: nothing is drawn on a terminal before.
    """

    def __init__(
        self, num_tokens: int | None = None, console: Console | None = None, delay_s: float = 1.0
    ) -> None:
        console = console or Console(stderr=True)
        delay_s = delay_s if console.is_terminal else LINE_EVERY_S
        super().__init__(console, "reading the prompt", delay_s, LINE_EVERY_S)
        self._num_tokens = num_tokens

    def show(self, event: Event) -> None:
        """Show the progress of prefill; stop as soon as there is text."""
        if event.token_ids or event.result is not None:
            self.stop()
        elif self._num_tokens is not None:
            num_read = event.num_prompt_read
            self.advance(num_read / self._num_tokens, f"{num_read}/{self._num_tokens}")


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar over ``total`` pieces of work; call the yielded function after each piece.

    Off a terminal there is a line for each tenth of the work.
    """
    console, done = Console(stderr=True), 0
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)

        def advance(text: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, advance=1, description=text)
            if not console.is_terminal and 10 * done // total > 10 * (done - 1) // total:
                console.print(f"{done} of {total}: {text}", markup=False, soft_wrap=True)

        yield advance


@contextmanager
def reply_display(
    llm: LLM, console: Console, num_prompt_tokens: int | None = None, wraps: bool = False
) -> Iterator[Callable[[Event], None]]:
    """Shows a reply: call the yielded function with each event.

    Ctrl-C ends the reply, whose result then has finish reason "cancelled".

    Args:
        llm: the model that replies.
        console: gets the text.
        num_prompt_tokens: if they are known.
        wraps: break lines between words on a terminal.
    """
    words = WholeWords(console) if wraps and console.is_terminal else None
    with interruptible() as pressed, PromptProgress(num_prompt_tokens) as progress:

        def show(event: Event) -> None:
            progress.show(event)
            if words is None:
                show_pieces(console, event.pieces)
            else:
                words.show(event.pieces, is_last=event.result is not None)
            if pressed and event.result is None:
                llm.engine.cancel(event.request_id)

        yield show


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collects the first Ctrl-C instead of raising it; the second raises as always."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
