"""Every outcome of a random procedure, with its exact probability.

A procedure asks a `Ledger` for its decisions. `outcomes` runs it again and again, each time with
another script of decisions, until every path has been taken once; the weight of a path is the
product of the probabilities along it.

A decision may name the uniform number that takes it. Two decisions by the same number are then
not independent: the ledger remembers the interval that the number must lie in and splits it
further. That is what a procedure that shares random numbers really does, so such a bug shows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import pytest
from torch import Tensor

from foredraft.core import choices as keyed_choices
from foredraft.core.choices import DrawnChoices
from foredraft.core.draws import Key
from foredraft.core.sampling import Law as TokenLaw
from foredraft.drafters.model import staged
from foredraft.models import base as models_base

Result = TypeVar("Result", bound=Hashable)
Law = dict[Result, float]
_ROUNDING = 1e-12


class Ledger:
    """The decisions of one run: the scripted ones first, then the first possible of each.

    Attributes:
        weight: the probability of the decisions taken so far.
        untried: scripts of the paths that branched off behind this run's own script.
    """

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self._script, self._taken = script, list[int]()
        self._interval: dict[Hashable, tuple[float, float]] = {}
        self.weight = 1.0
        self.untried: list[tuple[int, ...]] = []

    def decide(self, weights: Sequence[float], number: Hashable = None) -> int:
        """Take one of the branches, which have probabilities in proportion to ``weights``.

        Args:
            weights: one a branch, none negative, with a positive sum.
            number: names the uniform number that decides; None is a fresh one.
        """
        assert all(weight >= 0.0 for weight in weights), f"no probabilities: {weights}"
        low, high = self._interval.get(number, (0.0, 1.0))
        edges = _edges(weights)
        shares = [max(0.0, min(high, right) - max(low, left)) for left, right in pairwise(edges)]
        branch = self._branch(shares)
        self.weight *= shares[branch] / (high - low)
        if number is not None:
            self._interval[number] = (max(low, edges[branch]), min(high, edges[branch + 1]))
        return branch

    def _branch(self, shares: Sequence[float]) -> int:
        possible = [branch for branch, share in enumerate(shares) if share > 0.0]
        if len(self._taken) < len(self._script):
            branch = self._script[len(self._taken)]
        else:
            branch, *others = possible
            self.untried += [(*self._taken, other) for other in others]
        self._taken.append(branch)
        return branch


def _edges(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    assert 0.0 < total < math.inf, f"no probabilities: {weights}"
    edges = [0.0]
    for weight in weights:
        edges.append(min(1.0, edges[-1] + weight / total))
    last = max(branch for branch, weight in enumerate(weights) if weight > 0.0)
    edges[last + 1 :] = [1.0] * (len(weights) - last)  # rounding must not lose the last branch
    return edges


def _accept_or_not(probability: float) -> tuple[float, float]:
    assert -_ROUNDING <= probability <= 1.0 + _ROUNDING, f"no probability: {probability}"
    clamped = min(1.0, max(0.0, probability))
    return clamped, 1.0 - clamped


def outcomes(procedure: Callable[[Ledger], Result]) -> Iterator[tuple[Result, float]]:
    """Every path of ``procedure``: what it returns there, and how probable that path is."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        ledger = Ledger(scripts.pop())
        result = procedure(ledger)
        scripts += ledger.untried
        yield result, ledger.weight


def law(procedure: Callable[[Ledger], Result]) -> Law[Result]:
    """The distribution of what ``procedure`` returns."""
    total: Law[Result] = defaultdict(float)
    for result, weight in outcomes(procedure):
        total[result] += weight
    assert math.isclose(math.fsum(total.values()), 1.0, abs_tol=_ROUNDING)
    return dict(total)


def total_variation(left: Law[Result], right: Law[Result]) -> float:
    """Half the sum of the absolute differences."""
    return math.fsum(abs(left.get(x, 0.0) - right.get(x, 0.0)) for x in {**left, **right}) / 2


class LedgerChoices(DrawnChoices):
    """Draft and verify choices of one step, each taken by a number of its own."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def draw(self, probs_V: Tensor, index: int) -> int:
        return self._ledger.decide(probs_V.tolist())

    def draw_target(self, law: TokenLaw, depth: int) -> int:
        return self._ledger.decide(law.probs_V.tolist())

    def accept(self, probability: float, index: int) -> bool:
        return self._ledger.decide(_accept_or_not(probability)) == 0

    def draw_residual(self, probs_V: Tensor) -> int:
        return self._ledger.decide(probs_V.tolist())


class _LedgerNumber:
    """Stands in for a keyed uniform number: every use of it is a decision of the ledger."""

    def __init__(self, ledger: Ledger, key: Hashable) -> None:
        self._ledger, self._key = ledger, key

    def __lt__(self, probability: float) -> bool:
        return self._ledger.decide(_accept_or_not(probability), self._key) == 0

    def draw(self, probs_V: Tensor) -> int:
        return self._ledger.decide(probs_V.tolist(), self._key)


@contextmanager
def keyed_numbers_from(ledger: Ledger) -> Iterator[None]:
    """Let the shipped keyed choices, keys and all, decide by ``ledger``.

    In place of Gumbel noise the draws of one position share one uniform number, which is another
    coupling of drafter and target, and one that can be enumerated. A request for the noise of some
    tokens reveals in which half that number lies. That the noise itself draws from the law is shown
    in tests/core/test_noise.py.
    """

    def argmax(
        logits_V: Tensor, seed: int, position: int, scale: float = 1.0, cut: float = -math.inf
    ) -> int:
        logits_V = logits_V.masked_fill(logits_V < cut, -math.inf)
        probs_V = ((logits_V - logits_V.max()) * scale).softmax(0)
        return ledger.decide(probs_V.tolist(), ("noise", seed, position))

    def top(
        logits_V: Tensor, count: int, seed: int, position: int, scale: float = 1.0
    ) -> list[tuple[int, float]]:
        first = argmax(logits_V, seed, position, scale)
        possible = [t for t, logit in enumerate(logits_V.tolist()) if logit > -math.inf]
        return [(t, -float(i)) for i, t in enumerate(sorted(possible, key=lambda t: t != first))][
            :count
        ]

    def rows(logits_NV: Tensor, wanted: Sequence[tuple[int, Key]]) -> list[TokenLaw | None]:
        drawn: list[TokenLaw | None] = []
        for row, (seed, position, scale) in wanted:
            best = int(logits_NV[row].argmax())
            token = argmax(logits_NV[row], seed, position, scale) if scale else best
            drawn.append(TokenLaw(logits_NV[row], scale or None, best, drawn=token))
        return drawn

    def noise(tokens: Sequence[int], seed: int, position: int) -> list[float]:
        half = ledger.decide((0.5, 0.5), ("noise", seed, position))
        return [float(token % 2 == half) for token in tokens]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyed_choices, "gumbel_argmax", argmax)
        patch.setattr(staged, "gumbel_argmax", argmax)
        patch.setattr(models_base, "draw_rows", rows)
        patch.setattr(keyed_choices, "gumbel_noise", noise)
        patch.setattr(keyed_choices, "gumbel_top", top)
        patch.setattr(keyed_choices, "keyed_uniform", lambda *key: _LedgerNumber(ledger, key))
        patch.setattr(keyed_choices, "draw_token", lambda probs_V, number: number.draw(probs_V))
        yield
