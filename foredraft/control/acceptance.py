"""How often each position of a draft is filled, and how often what fills it is accepted.

Position k is the k-th node of a proposal. Drafters put what they trust most first, so positions
are an order of trust, in trees and chains alike. Counts of a request begin with those of its kind,
worth a few observations, and forget slowly. Requests whose distribution is bent by something that
the others do not share (a grammar, bans, penalties) teach none but themselves.

Shape legend: K positions; 2 for filled, and filled and accepted; 3 for how much noise there is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foredraft.core.params import SamplingParams
from foredraft.core.record import RowStep
from foredraft.core.traits import DrafterTraits

Array: TypeAlias = npt.NDArray[Any]
MOST_POSITIONS = 32

_REQUEST_MEMORY = 0.97
"""Decay of an observation's weight by the next one: about the last 30 count."""
KIND_MEMORY = 0.995
_KIND_WEIGHT = 16.0
"""Observations of its own after which a request counts more than its kind."""
_FALLING = 0.71
"""Prior: each further position is accepted so many times as often as the one before."""
_KEPT = 0.9
"""Prior: so much of the acceptance that was measured on other text."""

Kind: TypeAlias = tuple[int, str]
"""Requests that teach each other: how much noise there is, and the coupling."""

_ALONE = (
    "grammar", "allowed_token_ids", "bad_words", "logit_bias", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_PLAIN = SamplingParams()


_NOISES = "greedy", "a little noise", "noise"


def kind_of(params: SamplingParams) -> Kind:
    """Greedy, a little noise, much noise."""
    noise = 0 if params.temperature == 0.0 else 1 if params.temperature <= 0.5 else 2
    return noise, params.coupling


def is_constrained(params: SamplingParams) -> bool:
    """Whether its distribution is bent in a way of its own."""
    return any(getattr(params, name) != getattr(_PLAIN, name) for name in _ALONE)


@dataclass(frozen=True)
class Prior:
    """The expected acceptance of a drafter before anything was counted.

    Attributes:
        first: the chance that the first position's token is accepted, by noise (see `kind_of`). Of
            unknown drafters it is high enough to try.
        filled: the chance that the first position is filled.
        weight: observations that it is worth.
        is_measured: whether ``first`` was measured when the drafter was made.
        is_chain: whether each position is as good as the one before it, if that one is accepted.
        stops: whether the drafter ends chains that it doubts: then a position is filled where
            those before it are likely to be accepted.
    """

    first: tuple[float, float, float] = (0.33, 0.25, 0.15)
    filled: float = 0.6
    weight: float = 4.0
    is_chain: bool = False
    is_measured: bool = False
    stops: bool = False

    @classmethod
    def of(cls, drafter: DrafterTraits) -> Prior:
        """By what the drafter says of itself."""
        is_chain = drafter.round_share is not None
        if drafter.promise is None:
            return cls(is_chain=is_chain, stops=drafter.stops)
        greedy, sampled = ((1.0 if is_chain else _KEPT) * chance for chance in drafter.promise)
        chances = (greedy, (greedy + sampled) / 2, sampled)
        weight = 8.0 if drafter.is_guess else 32.0
        return cls(chances, 1.0, weight, is_chain, not drafter.is_guess, drafter.stops)

    def less(self, share: float) -> Prior:
        greedy, little, much = (share * chance for chance in self.first)
        return replace(self, first=(greedy, little, much))

    @cached_property
    def rates_32K(self) -> Array:
        """[3, 2, K] by noise: see `PositionCounts.rates`."""
        return np.stack([*map(self.rates_2K, self.first)])

    def rates_2K(self, first: float) -> Array:
        """[2, K] with this chance of the first position's token."""
        before_K = np.arange(MOST_POSITIONS)
        going_on = first if self.stops else 1.0 if self.is_chain else 0.95
        filled_K = self.filled * going_on**before_K
        falling = first if self.is_chain else _FALLING
        return np.stack((filled_K, np.minimum(filled_K, first * falling**before_K)))


class PositionCounts:
    """Counts [3, K]: how often a position was allowed, was filled, was accepted.

    Args:
        memory: what an observation is still worth after the next.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.counts = np.zeros((3, MOST_POSITIONS))

    def note(self, row: RowStep) -> None:
        budget = min(row.budget, MOST_POSITIONS)
        self.counts[:, :budget] *= self._memory
        self.counts[0, :budget] += 1.0
        self.counts[1, : min(len(row.proposal.tree), budget)] += 1.0
        if row.verdict is not None and row.verdict.path:
            self.counts[2, [node for node in row.verdict.path if node < budget]] += 1.0

    def rates(self, prior_2K: Array, weight: float) -> Array:
        """[2, K]: the chance that a position is filled, and that it is filled and accepted."""
        allowed_K = self.counts[0]
        rates_2K: Array = (self.counts[1:] + weight * prior_2K) / (allowed_K + weight)
        return rates_2K

    def chain_chance(self, prior: float, weight: float, stops: bool) -> float:
        """The chance of a chain's token where the one before it was accepted, by all positions.

        Args:
            stops: see `Prior`. Then most of what is filled stands behind accepted tokens.
        """
        filled_K, accepted_K = self.counts[1:]
        chances_K = accepted_K / np.maximum(filled_K, 1e-9)
        before_K = np.ones(MOST_POSITIONS - 1) if stops else chances_K[:-1]
        num_decided = float(filled_K[0] + filled_K[1:] @ before_K)
        return (float(accepted_K.sum()) + weight * prior) / (num_decided + weight)


_ENOUGH = 100.0
_BELOW, _DEVIATIONS = 0.1, 4.0
"""A drafter is below what was measured by so much, and by so many standard deviations."""


LIKELY_CAUSES = "another chat template, other weights or another language than then"
"""Why a drafter would do worse than when it was made."""


@dataclass(frozen=True)
class FirstToken:
    """How often a drafter's first token is right, beside what was measured when it was made.

    Attributes:
        noise: of the requests; see `kind_of`.
        promised, seen: chances.
        count: drafts that ``seen`` is of; old ones count less.
    """

    drafter: str
    noise: str
    promised: float
    seen: float
    count: float

    @property
    def is_below(self) -> bool:
        """Whether it stays below by more than chance would have it."""
        if self.count < _ENOUGH:
            return False
        deviation = math.sqrt(self.promised * (1.0 - self.promised) / self.count)
        return self.promised - self.seen > max(_BELOW, _DEVIATIONS * deviation)


KindCounts: TypeAlias = dict[tuple[str, Kind], PositionCounts]
"""By drafter and kind of request."""


@dataclass(frozen=True)
class _Request:
    kind: Kind
    is_constrained: bool
    own: dict[str, PositionCounts]


class Acceptance:
    """See the module docstring. Drafters are keyed by name.

    Args:
        kinds: what is known already; it grows.
        priors: by drafter: what to begin with where nothing is known.
    """

    def __init__(
        self, kinds: KindCounts | None = None, priors: Mapping[str, Prior] | None = None
    ) -> None:
        self._kinds = {} if kinds is None else kinds
        self._priors = dict(priors or {})
        self._requests: dict[int, _Request] = {}

    def begin(self, request_id: int, params: SamplingParams) -> None:
        """From now on this request is known; not when it is known already."""
        if request_id not in self._requests:
            known = _Request(kind_of(params), is_constrained(params), {})
            self._requests[request_id] = known

    def knows(self, request_id: int) -> bool:
        """Whether a request has begun here, and not ended."""
        return request_id in self._requests

    def end(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def observe(self, drafter: str, row: RowStep) -> None:
        """One step of one row. Nothing is learnt where the drafter was not asked, nor from tokens
        that rules forced or that come behind such."""
        request = self._requests.get(row.request_id)
        if request is None or not row.budget or row.num_forced:
            return
        request.own.setdefault(drafter, PositionCounts(_REQUEST_MEMORY)).note(row)
        if not request.is_constrained:
            key = drafter, request.kind
            self._kinds.setdefault(key, PositionCounts(KIND_MEMORY)).note(row)

    def rates(self, drafter: str, request_id: int) -> Array:
        """[2, K] of a request: see `PositionCounts.rates`."""
        request = self._requests[request_id]
        kind_2K = self.kind_rates(drafter, request.kind)
        own, prior = request.own.get(drafter), self._prior(drafter)
        if own is None:
            return kind_2K
        if prior.is_chain:
            known = float(kind_2K[1, 0])
            kind_2K = prior.rates_2K(own.chain_chance(known, _KIND_WEIGHT, prior.stops))
        return own.rates(kind_2K, _KIND_WEIGHT)

    def num_seen(self, drafter: str, request_id: int) -> float:
        """Drafts of this drafter for a request; old ones count less."""
        own = self._requests[request_id].own.get(drafter)
        return float(own.counts[0, 0]) if own else 0.0

    def kind_rates(self, drafter: str, kind: Kind) -> Array:
        """[2, K] of requests like these."""
        counts, prior = self._kinds.get((drafter, kind)), self._prior(drafter)
        if counts is None:
            return self.prior_rates(drafter, kind)
        if not prior.is_chain:
            return counts.rates(self.prior_rates(drafter, kind), prior.weight)
        # Else a position never tried would be thought worse than the one before it for ever.
        first = counts.chain_chance(prior.first[kind[0]], prior.weight, prior.stops)
        return counts.rates(prior.rates_2K(first), prior.weight)

    def prior_rates(self, drafter: str, kind: Kind) -> Array:
        """[2, K] of requests like these, had nothing been seen yet."""
        rates_2K: Array = self._prior(drafter).rates_32K[kind[0]]
        return rates_2K

    def first_tokens(self) -> list[FirstToken]:
        """Of all drafters that were measured when they were made, and have drafted since."""
        return [
            FirstToken(drafter, _NOISES[noise], prior.first[noise], right / filled, filled)
            for (drafter, (noise, coupling)), counts in self._kinds.items()
            if (prior := self._prior(drafter)).is_measured and coupling == "seeded"
            for _, filled, right in [counts.counts[:, 0].tolist()]
            if filled
        ]

    def _prior(self, drafter: str) -> Prior:
        return self._priors.setdefault(drafter, Prior())
