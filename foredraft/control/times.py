"""How long drafters take, by the number of rows they draft for: followed from step records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_STEP = 0.2
_FIRST = 3
"""Of so many times the shortest counts."""
_HICCUP = 3.0
"""What takes so many times the usual is the machine's doing."""
_PATIENCE = 24, 1024
"""Steps without a drafter until what it took is doubted, at first and at most."""


@dataclass
class _Curve:
    """Milliseconds of a row by rows, at powers of two; a mean that follows.

    Attributes:
        known: what it is thought to take.
        least: the least that it was ever seen, or expected, to take.
        seen: how often, since it was last doubted.
        idle, patience: steps since it was last seen, and until it is doubted.
        is_doubted: whether the least counts until it is seen again.
    """

    known: dict[int, float] = field(default_factory=dict)
    least: dict[int, float] = field(default_factory=dict)
    seen: Counter[int] = field(default_factory=Counter)
    idle: int = 0
    patience: int = _PATIENCE[0]
    is_doubted: bool = False

    def note(self, num_rows: int, ms: float, expected_ms: float | None = None) -> float:
        """Returns what it is now thought to take: a hiccup is the machine's doing.

        Args:
            expected_ms: what it was thought to take before anything was seen, if anything.
        """
        place, per_row = _place(num_rows), ms / num_rows
        least = per_row if expected_ms is None else min(per_row, expected_ms / num_rows)
        self.least[place] = min(least, self.least.get(place, least))
        if expected_ms is not None and place not in self.known:
            per_row = min(per_row, _HICCUP * expected_ms / num_rows)
        self.idle, self.patience = 0, max(_PATIENCE[0], self.patience - 1)
        if self.is_doubted:
            self.is_doubted = False
            self.seen.clear()
        before = self.known.get(place, per_row)
        self.seen[place] += 1
        if self.seen[place] <= _FIRST:  # what happens only once is not how long it takes
            self.known[place] = min(before, per_row)
        else:
            after = min(per_row, _HICCUP * before) if before > 0.0 else per_row
            self.known[place] = before + _STEP * (after - before)
        return self.known[place] * num_rows

    def wait(self) -> None:
        """A step begins; see `DraftTimes.wait`."""
        self.idle += 1
        if self.idle >= self.patience:
            self.idle, self.patience = 0, min(2 * self.patience, _PATIENCE[1])
            self.is_doubted = True

    def ms(self, num_rows: int) -> float | None:
        """By the nearest number of rows that was seen; None: none was."""
        if not num_rows:
            return 0.0
        if not self.known:
            return None
        place, times = _place(num_rows), self.least if self.is_doubted else self.known
        nearest = min(times, key=lambda known: (abs(known - place), -known))
        return times[nearest] * num_rows

    @property
    def most_rows(self) -> int:
        return 1 << max(self.known) if self.known else 0


class DraftTimes:
    """What each drafter takes a step: to propose, and to follow what was committed."""

    def __init__(self) -> None:
        self._proposing: dict[str, _Curve] = {}
        self._learning: dict[str, _Curve] = {}

    def observe(
        self,
        drafter: str,
        num_asked: int,
        draft_ms: float,
        num_following: int,
        learn_ms: float,
        num_rounds: int = 1,
        expected_ms: float | None = None,
    ) -> float:
        """A step in which this drafter was the only one.

        Args:
            num_rounds: forwards that it drafted with, where its time grows with them; else 1.
            expected_ms: what one of them was thought to take before any was seen, if anything.

        Returns:
            What both together are now thought to take, in milliseconds.
        """
        if num_asked and num_rounds:
            curve = self._proposing.setdefault(drafter, _Curve())
            draft_ms = num_rounds * curve.note(num_asked, draft_ms / num_rounds, expected_ms)
        if num_following:
            learn_ms = self._learning.setdefault(drafter, _Curve()).note(num_following, learn_ms)
        return draft_ms + learn_ms

    def wait(self) -> None:
        """A step: who was not seen for long is taken to be as quick as ever.

        It was perhaps measured beside a busy neighbour, and who is never asked is never corrected.
        """
        for curve in self._proposing.values():
            curve.wait()

    def round_ms(self, drafter: str, num_asked: int) -> float | None:
        """To propose for so many rows, with one forward where it takes several.

        None: that is not known yet.
        """
        curve = self._proposing.get(drafter)
        return curve.ms(num_asked) if curve else None

    def follow_ms(self, drafter: str, num_following: int) -> float:
        """To follow so many rows; 0 where that is not known yet."""
        curve = self._learning.get(drafter)
        return (curve.ms(num_following) if curve else None) or 0.0

    def most_rows(self, drafter: str) -> int:
        """The most rows that it is known to have drafted for at once, roughly."""
        curve = self._proposing.get(drafter)
        return curve.most_rows if curve else 0


def _place(num_rows: int) -> int:
    return (num_rows - 1).bit_length()
