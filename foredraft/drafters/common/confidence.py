"""How far a match can be trusted: measured on the text itself, whether or not anything is drafted.

Whenever a token is committed, the structure that was matched would have predicted one. Whether it
was right says how often matches of that length hold in this text. Because this looks at committed
text alone, it costs no forward, goes on while nothing is drafted, and does not depend on what was
drafted and rejected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Matches up to each of these lengths share an estimate; longer ones share the last."""


class MatchConfidence:
    """Probability that the most frequent continuation of a match is right, by match length.

    Args:
        prior: probability for each class of lengths, before anything was seen (see `priors`).
        prior_weight: how many observations the prior counts for.
    """

    def __init__(self, prior: Sequence[float], prior_weight: float = 12.0) -> None:
        self._hits = [prob * prior_weight for prob in prior]
        self._trials = [prior_weight] * len(prior)

    def __getitem__(self, length: int) -> float:
        return self.of_class(bisect_left(_LENGTHS, length))

    def of_class(self, group: int) -> float:
        """Likewise, by the number of the class."""
        return self._hits[group] / self._trials[group]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of all classes."""
        return tuple(hits / trials for hits, trials in zip(self._hits, self._trials, strict=True))

    def record(self, length: int, hit: bool) -> None:
        """A match of ``length`` tokens predicted the next token rightly or not."""
        self.record_class(bisect_left(_LENGTHS, length), hit)

    def record_class(self, group: int, hit: bool) -> None:
        """Likewise, by the number of the class."""
        self._hits[group] += hit
        self._trials[group] += 1.0
