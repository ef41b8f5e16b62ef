"""How long drafters take, by the number of rows they draft for: followed from step records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_STEP = 0.2
_FIRST = 3
"""Of so many times the shortest counts."""
HICCUP = 3.0
"""Times are clipped to so many times the usual: what is beyond is the machine's doing."""
_PATIENCE = 24, 1024
"""Steps without a drafter until what it took is doubted, at first and at most."""
_MEMORY = 0.9
"""Weight of a text that was read, after the next."""


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
        bucket, per_row = _bucket(num_rows), ms / num_rows
        least = per_row if expected_ms is None else min(per_row, expected_ms / num_rows)
        self.least[bucket] = min(least, self.least.get(bucket, least))
        if expected_ms is not None and bucket not in self.known:
            per_row = min(per_row, HICCUP * expected_ms / num_rows)
        self.idle, self.patience = 0, max(_PATIENCE[0], self.patience - 1)
        if self.is_doubted:
            self.is_doubted = False
            self.seen.clear()
        before = self.known.get(bucket, per_row)
        self.seen[bucket] += 1
        if self.seen[bucket] <= _FIRST:  # what happens only once is not how long it takes
            self.known[bucket] = min(before, per_row)
        else:
            after = min(per_row, HICCUP * before) if before > 0.0 else per_row
            self.known[bucket] = before + _STEP * (after - before)
        return self.known[bucket] * num_rows

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
        bucket, times = _bucket(num_rows), self.least if self.is_doubted else self.known
        nearest = min(times, key=lambda known: (abs(known - bucket), -known))
        return times[nearest] * num_rows


@dataclass
class _PerToken:
    """Milliseconds by the tokens of a text; recent texts count more."""

    ms: float = 0.0
    tokens: float = 0.0

    def note(self, tokens: float, ms: float) -> None:
        self.ms, self.tokens = _MEMORY * self.ms + ms, _MEMORY * self.tokens + tokens


class DraftTimes:
    """Times of each drafter: to propose and to follow in a step, to join and to read a text."""

    def __init__(self) -> None:
        self._proposing: dict[str, _Curve] = {}
        self._learning: dict[str, _Curve] = {}
        self._joining: dict[str, _PerToken] = {}
        self._reading: dict[str, _PerToken] = {}

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
        """A drafter's part of a step.

        Args:
            num_rounds: forwards that it drafted with, where its time grows with them; else 1.
            expected_ms: what one of them was thought to take before any was seen, if anything.

        Returns:
            The new estimate of both together, in milliseconds.
        """
        if num_asked and num_rounds:
            curve = self._proposing.setdefault(drafter, _Curve())
            draft_ms = num_rounds * curve.note(num_asked, draft_ms / num_rounds, expected_ms)
        if num_following:
            learn_ms = self._learning.setdefault(drafter, _Curve()).note(num_following, learn_ms)
        return draft_ms + learn_ms

    def wait(self) -> None:
        """Call once a step. A drafter that has not run for a while falls back to its best known
        time, so that a bad measurement cannot exclude it for good."""
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

    def joined(self, drafter: str, num_tokens: int, ms: float) -> float:
        """It began to follow texts of so many tokens; returns the time without hiccups."""
        known = self.join_ms(drafter, num_tokens)
        self._joining.setdefault(drafter, _PerToken()).note(num_tokens, ms)
        return min(ms, HICCUP * known) if known else ms

    def join_ms(self, drafter: str, num_tokens: int) -> float:
        """To begin to follow a text; 0 where that is not known yet."""
        return self._per_token(self._joining, drafter) * num_tokens

    def has_read(self, drafter: str, num_tokens: int, ms: float) -> None:
        """Its model read so many tokens of texts."""
        self._reading.setdefault(drafter, _PerToken()).note(num_tokens, ms)

    def read_ms(self, drafter: str, num_tokens: int) -> float | None:
        """For its model to read a text; None: that is not known yet."""
        per_token = self._per_token(self._reading, drafter)
        return per_token * num_tokens if per_token else None

    def _per_token(self, kept: Mapping[str, _PerToken], drafter: str) -> float:
        found = kept.get(drafter)
        return found.ms / found.tokens if found and found.tokens else 0.0

    def most_rows(self, drafter: str) -> int:
        """The most rows that it is known to have drafted for at once, roughly."""
        curve = self._proposing.get(drafter)
        return 1 << max(curve.known) if curve and curve.known else 0


def _bucket(num_rows: int) -> int:
    return (num_rows - 1).bit_length()
