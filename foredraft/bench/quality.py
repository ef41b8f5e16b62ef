"""How far a model in few bits is from the same model in float32.

Speed is compared at equal text; a coarser weight format changes the text, so its figure of speed
needs one of quality beside it.

Shape legend: N scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow, Target

WINDOW = 512
"""Tokens of a text that are scored together: each one sees those before it in its window."""

_CHUNK = 64


@dataclass(frozen=True)
class Quality:
    """What replacing the reference by the candidate does to the next-token distributions.

    Attributes:
        num_tokens: distributions compared.
        mean_kl: mean of KL(reference || candidate), in nats.
        p99_kl: its 99th percentile over the tokens.
        top1_agreement: share of tokens where both have the same most likely token.
        perplexity: of the text under the candidate.
        reference_perplexity: of the text under the reference.
    """

    num_tokens: int
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def windows(tokens: Sequence[int], limit: int | None = None) -> list[Sequence[int]]:
    """A text cut into windows; the last is left out if it has a single token, which predicts none.

    Args:
        tokens: of the text.
        limit: use at most this many.
    """
    used = tokens[:limit]
    cut = [used[start : start + WINDOW] for start in range(0, len(used), WINDOW)]
    return [window for window in cut if len(window) > 1]


def measure_quality(
    reference: Target,
    candidate: Target,
    texts: Sequence[Sequence[int]],
    advance: Callable[[], None] = lambda: None,
) -> Quality:
    """Score the same texts with both and compare each token's distribution.

    Args:
        reference: the model in float32.
        candidate: the model as it is to be used.
        texts: token ids, at least two each; see `windows`.
        advance: called after each text.
    """
    parts: list[list[Tensor]] = []
    for tokens in texts:
        scored = zip(_log_probs(reference, tokens), _log_probs(candidate, tokens), strict=True)
        start = 1
        for reference_NV, candidate_NV in scored:
            next_N = torch.tensor(tokens[start : start + _CHUNK])
            parts.append(_compare(reference_NV[: len(next_N)], candidate_NV[: len(next_N)], next_N))
            start += _CHUNK
        advance()
    kl_N, agrees_N, reference_N, candidate_N = map(torch.cat, zip(*parts, strict=True))
    return Quality(
        num_tokens=len(kl_N),
        mean_kl=kl_N.mean().item(),
        p99_kl=kl_N.quantile(0.99).item(),
        top1_agreement=agrees_N.double().mean().item(),
        perplexity=math.exp(-candidate_N.mean().item()),
        reference_perplexity=math.exp(-reference_N.mean().item()),
    )


def _compare(reference_NV: Tensor, candidate_NV: Tensor, next_N: Tensor) -> list[Tensor]:
    """KL, agreement of the top token, and the log probabilities of the next one: each [N]."""
    kl_N = (reference_NV.exp() * (reference_NV - candidate_NV)).sum(-1)
    agrees_N = reference_NV.argmax(-1) == candidate_NV.argmax(-1)
    chosen = [x.gather(1, next_N[:, None])[:, 0] for x in (reference_NV, candidate_NV)]
    return [kl_N, agrees_N, *chosen]


def _log_probs(target: Target, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Log probabilities [N, V] after each token in float64, a chunk at a time."""
    slot = target.cache.allocate()
    try:
        for start in range(0, len(tokens), _CHUNK):
            first, *rest = tokens[start : start + _CHUNK]
            [scores] = target.score([ScoreRow(slot, [first], TokenTree.chain(rest))])
            target.cache.keep(slot, 1, range(len(rest)))
            yield scores.logits_NV.to("cpu", torch.float64).log_softmax(-1)
    finally:
        target.cache.free(slot)
