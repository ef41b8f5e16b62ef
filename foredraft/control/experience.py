"""Statistics that controllers on the same models share, also between processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foredraft.control.acceptance import KIND_MEMORY, MOST_POSITIONS, KindCounts, PositionCounts
from foredraft.control.times import DraftTimes

_log = logging.getLogger("foredraft")
_USUAL_LENGTH = 256
"""Tokens of a reply before any has ended, where ``max_tokens`` does not say less."""
_MEMORY = 0.9
"""Weight of a reply's length, after the next."""
_PAST_MEAN = 0.25
"""A reply beyond the mean length is expected to go on for so much of it."""
_KEPT_WEIGHT = 64.0
"""Observations that what earlier processes have seen is worth, at most."""
_EVERY = 64
"""Steps with drafts between two times that it is kept."""


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
    """Counts, times and lengths; engines on the same models share them. They hold no text.

    Attributes:
        keep: keeps `as_json` for later processes; None: it is not kept.
        plain_ms: of a step of the target now.
    """

    kinds: KindCounts = field(default_factory=dict)
    times: DraftTimes = field(default_factory=DraftTimes)
    lengths: ReplyLengths = field(default_factory=ReplyLengths)
    keep: Callable[[dict[str, Any]], None] | None = None
    plain_ms: Callable[[], float] = lambda: 1.0
    _num_unkept: int = 0

    def note_step(self) -> None:
        """A step has drafted."""
        self._num_unkept += 1

    def keep_now_and_then(self) -> None:
        """Call when a request ends: that is when a file may be written."""
        if self.keep is not None and self._num_unkept >= _EVERY:
            self._num_unkept = 0
            self.keep(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """All of it in values that JSON has."""
        kinds = [
            [drafter, *kind, np.round(counts.counts, 2).tolist()]
            for (drafter, kind), counts in self.kinds.items()
        ]
        lengths = [self.lengths.total, self.lengths.weight]
        return {"kinds": kinds, "times": self.times.as_json(self.plain_ms()), "lengths": lengths}

    def take_json(self, value: Mapping[str, Any] | None) -> None:
        """Take the result of `as_json` of an earlier process; anything else is left out."""
        if value is None:
            return
        try:
            for drafter, noise, coupling, counted in value["kinds"]:
                self.kinds[str(drafter), (int(noise), str(coupling))] = _counts(counted)
            self.times.take_json(value["times"], self.plain_ms())
            self.lengths = ReplyLengths(*map(float, value["lengths"]))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            _log.info("what was kept of drafters is not used: %s", error)


def _counts(counted: Any) -> PositionCounts:
    counts = PositionCounts(KIND_MEMORY)
    counts.counts[:] = np.array(counted, float).reshape(3, MOST_POSITIONS)
    counts.counts *= min(1.0, _KEPT_WEIGHT / max(counts.counts[0, 0], 1e-9))
    return counts
