"""What the terminal shows: text as it arrives, with the drafter's tokens set apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from foredraft.core.request import SpeculationStats
    from foredraft.engine.detokenize import Piece

DRAFTED = "underline green"
"""Accepted draft tokens: the underline tells them apart without colour, too."""


def show_pieces(console: Console, pieces: Iterable[Piece]) -> None:
    """Print text as it became certain."""
    for piece in pieces:
        style = DRAFTED if piece.drafted else ""
        console.print(Text(piece.text, style=style), end="", soft_wrap=True, highlight=False)


def legend() -> Text:
    """One line that says what the underline means."""
    return Text.assemble(
        ("underlined", DRAFTED), (": drafted and accepted; the rest is the target's own", "dim")
    )


def stats_line(stats: SpeculationStats, tokens_per_s: float) -> Text:
    """One line of what speculation did."""
    words = f"{stats.committed} tokens in {stats.steps} steps, {tokens_per_s:.1f} tokens/s"
    if stats.drafted:
        words += (
            f"; drafted {stats.drafted}: {stats.accepted} accepted, {stats.rejected} rejected, "
            f"{stats.discarded} past the stop; {stats.committed_per_step:.2f} committed per step"
        )
    return Text(words, style="dim")


def stats_dict(stats: SpeculationStats) -> dict[str, Any]:
    """The statistics for machines."""
    return vars(stats) | {"committed_per_step": round(stats.committed_per_step, 4)}
