"""Terminal output shared by commands: marked drafted text, progress, and Ctrl-C."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
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


def show_facts(facts: Mapping[str, Any], indent: str = "") -> None:
    """Print a line for each fact; those of a mapping stand below its name."""
    for name, value in facts.items():
        label = name.removesuffix("_bytes").replace("_", " ")
        if value and isinstance(value, Mapping):
            say(f"{indent}{label}")
            show_facts(value, f"{indent}  ")
            continue
        shown = value
        if value in (None, [], {}):
            shown = "none"
        elif isinstance(value, bool):
            shown = "yes" if value else "no"
        elif isinstance(value, list):
            shown = ", ".join(value)
        elif name.endswith("_bytes"):
            shown = megabytes(value)
        say(f"{indent}{label:<19}  {shown}")


def show_pieces(console: Console, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        style = DRAFTED if piece.drafted else ""
        console.print(Text(piece.text, style=style), end="", soft_wrap=True, highlight=False)


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


def loaded_drafters(llm: LLM) -> str:
    """The names of the drafters that a model has; "auto" has several."""
    return " and ".join(llm.policy.drafters) or "none"


class RichProgress:
    """Shows the stages of slow work on stderr; a `foredraft.models.files.progress.Progress`.

    On a terminal each stage is a line with a spinner, a bar, and the time that is left; the line
    disappears on exit. Anywhere else a stage is one printed line.

    Args:
        console: where to draw; stderr by default, so that stdout stays clean.
        log_every_s: off a terminal, the time between two lines that say which share of a stage is
            done.
    """

    def __init__(self, console: Console | None = None, log_every_s: float = math.inf) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._log_every_s, self._next_line_at = log_every_s, math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the display off the screen, if it is there."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def stage(self, text: str) -> None:
        self._stage, self._next_line_at = text, time.monotonic() + self._log_every_s
        if not self._console.is_terminal:
            self.say(f"{text} …")
            return
        if self._progress is None:
            self._progress = _rich_progress(self._console)
            self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=None, detail="")

    def advance(self, fraction: float, detail: str = "") -> None:
        """Set the finished share of the current stage, 0 to 1, and the text beside it."""
        share = min(max(fraction, 0.0), 1.0)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=1.0, completed=share, detail=detail)
        elif time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + self._log_every_s
            self.say(f"{self._stage}: {share:.1%}, {detail}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _rich_progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class PromptProgress(RichProgress):
    """Shows the prefill of a long prompt until text comes; off a terminal, a line now and then."""

    def __init__(self, num_tokens: int, console: Console | None = None) -> None:
        super().__init__(console, LINE_EVERY_S)
        self._num_tokens = num_tokens
        self._shown_from = time.monotonic() + (1.0 if self._console.is_terminal else LINE_EVERY_S)

    def show(self, event: Event) -> None:
        """Show the progress of prefill; stop as soon as there is text."""
        if event.token_ids or event.result is not None:
            self.stop()
        elif time.monotonic() >= self._shown_from:
            if self._stage is None:
                self.stage("reading the prompt")
            num_read = event.num_prompt_read
            self.advance(num_read / self._num_tokens, f"{num_read}/{self._num_tokens}")


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar over ``total`` pieces of work; call the yielded function after each piece."""
    done = 0
    with RichProgress(log_every_s=LINE_EVERY_S) as progress:
        progress.stage(f"{total} pieces of work")

        def advance(text: str) -> None:
            nonlocal done
            done += 1
            progress.advance(done / total, text)

        yield advance


@contextmanager
def reply_display(
    llm: LLM, console: Console, num_prompt_tokens: int
) -> Iterator[Callable[[Event], None]]:
    """Shows a reply: call the yielded function with each event.

    Ctrl-C ends the reply, whose result then has finish reason "cancelled".
    """
    with interruptible() as pressed, PromptProgress(num_prompt_tokens) as progress:

        def show(event: Event) -> None:
            progress.show(event)
            show_pieces(console, event.pieces)
            if pressed and event.result is None:
                llm.engine.cancel(event.request_id)

        yield show


@contextmanager
def interruptible(
    note: Callable[[], object] = lambda: None, signals: Iterable[int] = (signal.SIGINT,)
) -> Iterator[list[int]]:
    """Collects the first of some signals instead of ending; the second one raises as Ctrl-C does.

    Args:
        note: called at the first.
        signals: Ctrl-C alone by default.
    """
    pressed: list[int] = []

    def take(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)
        note()

    previous = {number: signal.signal(number, take) for number in signals}
    try:
        yield pressed
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
