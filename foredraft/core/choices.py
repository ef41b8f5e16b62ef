"""The only random primitives: accept with a probability, draw from a law, choose with its noise.

Verification and drafting see these verbs and no random numbers, so a test can put a ledger of
every outcome behind them and prove the shipped rules exact. The random numbers are keyed by
their purpose (see `core/rng.py` and `core/noise.py`).

A drafter gets one of two kinds, by the request's coupling, and they have no verb in common. With
"seeded" it may *choose* with the noise the target will draw with: likely right, and accepted only
if it is. With "drawn" it may *draw*, with numbers the target never sees, for the ratio test. A
token chosen with the target's noise and put to a ratio test would bend the distribution; there is
no way to write that down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from foredraft.core.draws import Scored
from foredraft.core.named import NamedLaws
from foredraft.core.noise import gumbel_argmax, gumbel_noise, gumbel_top
from foredraft.core.params import SamplingParams
from foredraft.core.rng import Purpose, keyed_uniform
from foredraft.core.sampling import Law, draw_token, scale_of

TRUST = 1.4
"""How fast the chance of a choice falls with its distance from the best perturbed score. Fitted to
accepted shares by distance, of draft models; it weighs nodes against time, and touches no
token."""

NUM_LOOKED_AT = 16
"""Number of best scores from which the chances of the first ones are estimated."""

_TILT = 0.35
"""Exponent on the Gumbel noise when only a token's average hit rate is known. A copy that is right
20 % of the time is usually right with near certainty in some positions and wrong in all others, so
the noise decides less than the average suggests. 1 would treat every position as average. Fitted to
the log loss of copies at temperatures 0.7 and 1."""

_MEAN_NOISE = 0.5772156649015329
"""Mean of Gumbel noise: Euler's constant."""


class Choice(NamedTuple):
    """A token that a drafter may choose, and the estimated chance that the target takes it."""

    token: int
    chance: float


class DrawKey(NamedTuple):
    """The key of a row's random numbers in one step: it fixes each of them.

    `draw_target` draws as plain decoding does; the other two take numbers that no drafter sees.

    Attributes:
        seed: of the request.
        position: tokens committed before the step; of a single draw the position of its token.
        scale: of the logits, for draws from laws that look at no text; 0 draws the likeliest.
        top_k, top_p, min_p: filters of such laws.
    """

    seed: int
    position: int
    scale: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams, seed: int, position: int) -> DrawKey:
        """The key for laws of temperature and filters alone."""
        scale = scale_of(params)
        filters = (params.top_k, params.top_p, params.min_p) if scale else ()
        return cls(seed, position, scale, *filters)

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def ahead(self, num_tokens: int) -> DrawKey:
        """The key ``num_tokens`` positions later."""
        return type(self)(self.seed, self.position + num_tokens, *self[2:])

    def draw_target(self, law: Law, depth: int) -> int:
        """Draw the token ``depth`` positions after the last committed one.

        Keyed by absolute position alone: plain decoding draws the same number there.
        """
        if law.drawn is not None:
            return law.drawn
        if law.scale is None:
            return law.token
        return gumbel_argmax(law.given_V, self.seed, self.position + depth, law.scale, law.cut)

    def accept(self, probability: float, index: int) -> bool:
        """Decision number ``index`` of this step: True with ``probability``."""
        return keyed_uniform(self.seed, self.position, Purpose.ACCEPT, index) < probability

    def draw_residual(self, probs_V: Tensor) -> int:
        """Draw the next token after the decisions."""
        return draw_token(probs_V, keyed_uniform(self.seed, self.position, Purpose.RESIDUAL))


LIKELIEST = DrawKey(0, 0)
"""Draws the likeliest token."""


class SharedChoices:
    """Random source of a seeded request's drafter: the noise of the target's own draw.

    Args:
        seed: of the request; None: without noise, the tokens that are likeliest before the draw.
        num_tokens: committed before the step.
        temperature: of the request.

    Attributes:
        has_noise: whether there is any.
    """

    def __init__(self, seed: int | None, num_tokens: int, temperature: float) -> None:
        self._seed, self._num_tokens = seed, num_tokens
        self.has_noise = seed is not None and temperature > 0.0

    def best(self, law: Law, depth: int, count: int = 1, trust: float = TRUST) -> list[Choice]:
        """The ``count`` tokens that a target with this law would likeliest draw, likeliest first.

        Args:
            law: the drafter's own, of the token ``depth`` positions after the last committed one.
            trust: how much a better score says, for drafters that are better or worse than most.
        """
        if law.scale is None or self._seed is None:
            return _likeliest(law, count)
        at = self._num_tokens + depth
        scored = gumbel_top(law.logits_V, _num_looked_at(count), self._seed, at, law.scale)
        return choices_of(scored, count, trust)

    def draw_key(self, depth: int, scale: float) -> DrawKey | None:
        """The key that draws the `best` token of a law of merely scaled logits; None: unsupported.

        Args:
            depth: as for `best`.
            scale: of the logits; 0 at temperature 0.
        """
        if self._seed is None:
            return LIKELIEST
        return DrawKey(self._seed, self._num_tokens + depth, scale)

    def best_each(
        self, laws: NamedLaws, depths: Sequence[int], count: int = 1, trust: float = TRUST
    ) -> list[list[Choice]]:
        """`best` of several laws over some of the tokens, each with its depth."""
        if self._seed is None:
            return [_likeliest(laws.law(index), count) for index in range(len(depths))]
        positions = [self._num_tokens + depth for depth in depths]
        found = laws.top(_num_looked_at(count), self._seed, positions)
        return [choices_of(scored, count, trust) for scored in found]

    def among(
        self, candidates: Sequence[Choice], depth: int, count: int = 1, trust: float = TRUST
    ) -> list[Choice]:
        """`best` for a law of which only the likeliest tokens are known.

        It misses a token that the target draws from the rest, and takes a small part of the time
        that a law over a vocabulary takes.

        Args:
            candidates: distinct tokens and their probabilities, likeliest first, none 0. The rest
                of the mass belongs to the other tokens.
        """
        if not self.has_noise or not candidates:
            return list(candidates[:count])
        noise = self._noise(candidates, depth)
        scored = sorted(
            (
                (math.log(max(c.chance, 1e-12)) + g, c.token)
                for c, g in zip(candidates, noise, strict=True)
            ),
            reverse=True,
        )[: _num_looked_at(count)]
        # The best of the unnamed tokens is Gumbel around the log of their mass: the chance that
        # it stays below the best named score is known.
        unnamed = max(0.0, 1.0 - sum(c.chance for c in candidates))
        named_wins = math.exp(-unnamed * math.exp(-scored[0][0]))
        chances = _softmax([trust * score for score, _ in scored])
        pairs = zip(scored, chances, strict=True)
        return [Choice(token, named_wins * chance) for (_, token), chance in pairs][:count]

    def weigh(self, candidates: Sequence[Choice], depth: int) -> list[Choice]:
        """The same tokens with the chances that the noise leaves them, likeliest first.

        Args:
            candidates: distinct tokens and the share of like positions where each came, as far as
                is known. The rest of the mass belongs to the other tokens.
        """
        if not self.has_noise or not any(c.chance for c in candidates):
            return list(candidates)
        odds = [
            c.chance * math.exp(_TILT * (g - _MEAN_NOISE))
            for c, g in zip(candidates, self._noise(candidates, depth), strict=True)
        ]
        total = sum(odds) + max(0.0, 1.0 - sum(c.chance for c in candidates))
        tokens = [c.token for c in candidates]
        weighed = sorted(zip(odds, tokens, strict=True), key=itemgetter(0), reverse=True)
        return [Choice(token, x / total) for x, token in weighed]

    def _noise(self, candidates: Sequence[Choice], depth: int) -> list[float]:
        assert self._seed is not None
        return gumbel_noise([c.token for c in candidates], self._seed, self._num_tokens + depth)


class DrawnChoices:
    """Random source of a drafter for coupling "drawn"; the target never uses its numbers.

    Keyed by the number of committed tokens and the node: a position that is drafted again after a
    rejection gets fresh numbers. Reusing the old ones would correlate the new draft with the
    rejection that has just been seen, and bias the output.

    Args:
        seed: of the request.
        num_tokens: committed before the step.
    """

    def __init__(self, seed: int, num_tokens: int) -> None:
        self.seed, self.num_tokens = seed, num_tokens

    def draw(self, probs_V: Tensor, index: int) -> int:
        """Draw draft token number ``index`` of this step."""
        return draw_token(probs_V, keyed_uniform(self.seed, self.num_tokens, Purpose.DRAFT, index))


DraftChoices = SharedChoices | DrawnChoices


def chance_alike(logits_V: Tensor, key: DrawKey) -> float:
    """The chance that a model that says nearly the same draws the same token.

    A draw that wins by little is easily lost: what counts is its distance from the next best sums.
    Unlike the token's probability it is calibrated at any temperature.

    Args:
        logits_V: finite where a token can occur, on CPU.
        key: of the draw from them.
    """
    if not key.scale:
        sums: list[float] = logits_V.topk(min(NUM_LOOKED_AT, len(logits_V))).values.tolist()
    else:
        sums = [
            s for _, s in gumbel_top(logits_V, NUM_LOOKED_AT, key.seed, key.position, key.scale)
        ]
    return _softmax(sums)[0]


def _likeliest(law: Law, count: int) -> list[Choice]:
    """The tokens of the largest logits, with their probability at temperature 1."""
    logits_V = law.logits_V
    top = logits_V.topk(min(count, logits_V.numel()))
    chances = (top.values - logits_V.logsumexp(0)).exp().tolist()
    pairs = zip(top.indices.tolist(), chances, strict=True)
    found = [Choice(token, chance) for token, chance in pairs if chance > 0.0]
    # Of equal logits torch may name any first; the target takes the first.
    return [Choice(law.token, found[0].chance), *(c for c in found if c.token != law.token)][:count]


def _num_looked_at(count: int) -> int:
    """More than ``count``: the scores after the last one show how sure it is."""
    return max(count + 1, NUM_LOOKED_AT)


def choices_of(scored: Scored, count: int, trust: float) -> list[Choice]:
    """The first tokens of these, with their chances by all sums of scaled logit and noise."""
    chances = _softmax([trust * score for _, score in scored])
    pairs = zip(scored[:count], chances, strict=False)
    return [Choice(token, chance) for (token, _), chance in pairs]


def _softmax(scores: Sequence[float]) -> list[float]:
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
