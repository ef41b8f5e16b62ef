"""Pairs of small models, a target and a draft model, with context-dependent tables.

Distributions are wide on purpose: near-one-hot tables hide a wrong rule.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.core.params import SamplingParams
from foredraft.core.sampling import Law as TokenLaw
from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.table import TableModel
from tests.core.reference import logits_to_probs, reference_probs, ruled_logits
from tests.exactness.ledger import Law

Tokens = tuple[int, ...]
Weights = list[float]
PLAIN = SamplingParams(temperature=1.0)
ORDER = 2
"""Number of last tokens that a table depends on."""


@dataclass(frozen=True)
class World:
    """A target and a draft model of one vocabulary; the models hold caches, so make a new pair."""

    vocab_size: int
    target_table: Callable[[Tokens], Sequence[float]]
    draft_table: Callable[[Tokens], Sequence[float]]

    def target(self) -> TableModel:
        return TableModel(self.vocab_size, self.target_table)

    def draft(self) -> TableModel:
        return TableModel(self.vocab_size, self.draft_table)


def _random(vocab_size: int, seed: str, spread: float = 1.0) -> Weights:
    generator = random.Random(seed)
    return [generator.expovariate(1.0) ** spread + 0.01 for _ in range(vocab_size)]


def _zeroed(weights: Weights, seed: str) -> Weights:
    """Without one to all but one of the tokens."""
    generator = random.Random(f"zeros/{seed}")
    count = generator.randint(1, len(weights) - 1)
    gone = generator.sample(range(len(weights)), count)
    return [0.0 if token in gone else weight for token, weight in enumerate(weights)]


def _disjoint(target: Weights, draft: Weights, seed: str) -> tuple[Weights, Weights]:
    keep = _zeroed([1.0] * len(target), seed)
    return (
        [weight * mine for weight, mine in zip(target, keep, strict=True)],
        [weight * (1.0 - mine) for weight, mine in zip(draft, keep, strict=True)],
    )


KINDS: dict[str, Callable[[Weights, Weights, str], tuple[Weights, Weights]]] = {
    "random": lambda p, q, seed: (p, q),
    "q is p": lambda p, q, seed: (p, p),
    "zeros in q": lambda p, q, seed: (p, _zeroed(q, seed)),
    "zeros in p": lambda p, q, seed: (_zeroed(p, seed), q),
    "zeros in both": lambda p, q, seed: (_zeroed(p, seed), _zeroed(q, f"q{seed}")),
    "disjoint": _disjoint,
    "q is flat": lambda p, q, seed: (p, [1.0] * len(q)),
    "q is sharp": lambda p, q, seed: (p, [weight**4 for weight in q]),
}
"""From random weights for target and draft, and a seed of the context, to what the world has."""


def world(kind: str, vocab_size: int, seed: int = 0) -> World:
    """The random world of a kind; its distributions depend on the last two tokens."""

    @functools.cache
    def tables(last: Tokens) -> tuple[Weights, Weights]:
        key = f"{kind}/{seed}/{last}"
        target, draft = _random(vocab_size, f"p{key}"), _random(vocab_size, f"q{key}")
        target, draft = KINDS[kind](target, draft, key)
        return _normalised(target), _normalised(draft)

    return World(
        vocab_size,
        lambda context: tables(context[-ORDER:])[0],
        lambda context: tables(context[-ORDER:])[1],
    )


def _normalised(weights: Weights) -> Weights:
    return [weight / sum(weights) for weight in weights]


class Distributions:
    """Distributions of a model's tables by the shipped sampling code, cached by context."""

    def __init__(self, model: TableModel, params: SamplingParams) -> None:
        self._model, self._params = model, params
        self._slot = model.cache.allocate()
        self._known: dict[Tokens, Tensor] = {}
        self.law = functools.cache(lambda context: TokenLaw.of_probs(self(context)))

    def __call__(self, context: Tokens) -> Tensor:
        if context not in self._known:
            (scores,) = self._model.score([ScoreRow(self._slot, context)])
            self._known[context] = logits_to_probs(scores.logits_NV[0], self._params)
        return self._known[context]


@dataclass(frozen=True)
class TreeProbs:
    """The distribution after each node of a tree that hangs off ``context``."""

    after: Callable[[Tokens], TokenLaw]
    context: Tokens
    tree: TokenTree

    def __call__(self, node: int) -> TokenLaw:
        path = () if node == ROOT else self.tree.paths[node]
        return self.after((*self.context, *(self.tree.tokens[i] for i in path)))


def target_law(
    world: World, params: SamplingParams, num_tokens: int, prompt: Tokens = ()
) -> Law[Tokens]:
    """The law of plain decoding, from the plain-Python reading of the sampling parameters."""
    texts: Law[Tokens] = {(): 1.0}
    for _ in range(num_tokens):
        longer: Law[Tokens] = {}
        for text, weight in texts.items():
            probs = world.target_table((*prompt, *text))
            logits = [math.log(p) if p else -math.inf for p in probs]
            ruled = ruled_logits(logits, params, prompt, text)
            for token, p in enumerate(reference_probs(ruled, params)):
                if p:
                    longer[*text, token] = weight * p
        texts = longer
    return texts


def flat(vocab_size: int) -> Tensor:
    return torch.full((vocab_size,), 1.0 / vocab_size, dtype=torch.float64)
