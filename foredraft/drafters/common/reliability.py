"""Whether a drafter's chances hold: what it promised, against what came."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.choices import Choice

_PRIOR = 6.0
"""Promised tokens that came, before anything was seen."""
_MEMORY = 0.995
"""Of each step by the next: some hundred steps count, so it follows from topic to topic."""
_LEAST, _MOST = 0.3, 1.2


class Reliability:
    """Corrects the chances of one kind of requests by one factor.

    A head is too sure of itself on text that is unlike what it learnt from, and above all where
    noise chooses among tokens that it knows little about. Then it drafts too deep. The factor
    weighs nodes against time, and touches no token.
    """

    def __init__(self) -> None:
        self._promised = self._came = _PRIOR

    @property
    def factor(self) -> float:
        return min(_MOST, max(_LEAST, self._came / self._promised))

    def corrected(self, choices: Sequence[Choice]) -> list[Choice]:
        """The same tokens with chances that have held so far."""
        factor = self.factor
        return [Choice(token, min(0.99, factor * chance)) for token, chance in choices]

    def record(self, choices: Sequence[Choice], token: int) -> None:
        """``token`` came where these, uncorrected, were what might come."""
        self._promised = _MEMORY * self._promised + sum(c.chance for c in choices)
        self._came = _MEMORY * self._came + any(c.token == token for c in choices)
