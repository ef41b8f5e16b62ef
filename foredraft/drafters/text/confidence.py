"""How far a match can be trusted: measured on the text itself, whether or not anything is drafted.

Whenever a token is committed, the structure that was matched would have predicted one. Whether it
was right says how often matches of that length hold in this text. Because this looks at committed
text alone, it costs no forward, goes on while nothing is drafted, and does not depend on what was
drafted and rejected.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

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
        """The hit rate of a class, by its number."""
        return self._hits[group] / self._trials[group]

    def record(self, length: int, hit: bool) -> None:
        """A match of ``length`` tokens predicted the next token rightly or not."""
        self.record_class(bisect_left(_LENGTHS, length), hit)

    def record_class(self, group: int, hit: bool) -> None:
        """Count a hit or a miss of a class, by its number."""
        self._hits[group] += hit
        self._trials[group] += 1.0


Shares = tuple[float, ...]
"""By class of match length or distance (`foredraft.drafters.text.confidence`)."""


@dataclass(frozen=True)
class Priors:
    """Shares of right guesses.

    Attributes:
        repeated_text: the most frequent continuation of a match within one text.
        other_text: the same for matches in other texts, which may be unrelated.
        followed: the next token of an expected text, by how long the two have agreed.
        met: the next token where both may agree again, by the distance of that place.
        replaced: the token after as many expected tokens as were written since the texts parted,
            by that number.
        inserted: the token where the texts parted, by that number.
        ranks: for each steadiness of a token's candidates, the candidate of each rank.
    """

    repeated_text: Shares
    other_text: Shares
    followed: Shares
    met: Shares
    replaced: Shares
    inserted: Shares
    ranks: tuple[Shares, ...]

    @classmethod
    def parse(cls, text: str) -> Priors:
        """From JSON as ``python -m benchmarks priors`` writes it; further keys are notes."""
        found: dict[str, Any] = json.loads(text)
        ranks = tuple(map(tuple, found.pop("ranks")))
        names = {field.name for field in fields(cls)} - {"ranks"}
        return cls(**{name: tuple(found[name]) for name in names}, ranks=ranks)


@cache
def priors() -> Priors:
    """The package's own."""
    return Priors.parse(files(__package__).joinpath("priors.json").read_text(encoding="utf-8"))
