"""Statistics that controllers on the same models share."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.control.acceptance import KindCounts
from foredraft.control.times import DraftTimes

_USUAL_LENGTH = 256
"""Tokens of a reply before any has ended, where ``max_tokens`` does not say less."""
_MEMORY = 0.9
"""Weight of a reply's length, after the next."""
_PAST_MEAN = 0.25
"""A reply beyond the mean length is expected to go on for so much of it."""


@dataclass
class ReplyLengths:
    """How long replies are, in tokens. A mean; recent ones count more."""

    total: float = _USUAL_LENGTH
    weight: float = 1.0

    def note(self, num_tokens: int) -> None:
        """A reply is over."""
        self.total, self.weight = _MEMORY * self.total + num_tokens, _MEMORY * self.weight + 1.0

    def remaining(self, num_committed: int, num_left: int) -> float:
        """Tokens that a reply is expected to go on for.

        Args:
            num_committed: tokens that it has.
            num_left: that it may still get.
        """
        mean = self.total / self.weight
        return min(float(num_left), max(mean - num_committed, _PAST_MEAN * mean))


@dataclass
class Experience:
    """Counts, times and lengths; engines on the same models share them. They hold no text."""

    kinds: KindCounts = field(default_factory=dict)
    times: DraftTimes = field(default_factory=DraftTimes)
    lengths: ReplyLengths = field(default_factory=ReplyLengths)
