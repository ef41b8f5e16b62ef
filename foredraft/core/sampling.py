"""From logits to the distribution the user asked for, and from a distribution to a token.

Shape legend: N nodes (the root and the draft tokens), V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.params import SamplingParams

_SHORTLIST = 512
"""Top-p first looks at this many candidates; a full sort of the vocabulary is rarely needed."""


def logits_to_probs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """The distribution ``params`` asks for at one position.

    Works on one row at a time on purpose: the bits of a result then cannot depend on how many
    rows were scored together.

    Args:
        logits_V: float32 or float64 logits; -inf is a token that cannot occur.

    Returns:
        Probabilities [V] of the same dtype. One-hot at temperature 0.

    Raises:
        NonFiniteScoresError: the largest logit is NaN or infinite.
    """
    best_token = _argmax(logits_V)
    best = logits_V[best_token]
    if not math.isfinite(best.item()):
        raise NonFiniteScoresError(
            f"the largest of {logits_V.numel()} logits is {best.item()}; the model's weights or "
            "activations are not finite here"
        )
    if params.temperature == 0.0:
        one_hot_V = torch.zeros_like(logits_V)
        one_hot_V[best_token] = 1.0
        return one_hot_V
    # Subtract before dividing, and by no less than the dtype can hold: a tiny temperature must
    # not end in 0/0.
    smallest = torch.finfo(logits_V.dtype).tiny
    logits_V = (logits_V - best) / max(params.temperature, smallest)
    if 0 < params.top_k < logits_V.numel():
        kth = logits_V.topk(params.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, -math.inf)
    probs_V = logits_V.softmax(0)
    if params.top_p < 1.0:
        probs_V = _renormalise(probs_V, probs_V >= _top_p_threshold(probs_V, params.top_p))
    if params.min_p > 0.0:
        probs_V = _renormalise(probs_V, probs_V >= params.min_p * probs_V.max())
    return probs_V


def _argmax(logits_V: Tensor) -> int:
    """The first of the largest; a NaN counts as larger than anything."""
    if logits_V.device.type == "cpu":
        return int(logits_V.detach().numpy().argmax())  # a tenth of the time that torch takes
    return int(logits_V.argmax().item())


def _renormalise(probs_V: Tensor, keep_V: Tensor) -> Tensor:
    kept_V = torch.where(keep_V, probs_V, probs_V.new_zeros(()))
    return kept_V / kept_V.sum()


def _top_p_threshold(probs_V: Tensor, top_p: float) -> Tensor:
    """The probability of the last token of the nucleus."""
    shortlist = probs_V.topk(min(_SHORTLIST, probs_V.numel())).values
    if shortlist.sum() < top_p:
        shortlist = _descending(probs_V)
    mass_before = shortlist.double().cumsum(0) - shortlist
    inside = int((mass_before < top_p).sum().item())
    return shortlist[max(inside, 1) - 1]


def _descending(values_V: Tensor) -> Tensor:
    if values_V.device.type == "cpu":  # a tenth of the time that torch takes, the same values
        return torch.from_numpy(np.sort(values_V.detach().numpy())[::-1].copy())
    return values_V.sort(descending=True).values


def draw_token(probs_V: Tensor, uniform: float) -> int:
    """Invert the cumulative distribution at ``uniform`` in [0, 1); never a zero-probability token.

    Args:
        probs_V: non-negative weights with a positive sum; they need not be normalised.
    """
    cumulative_V = probs_V.cumsum(0, dtype=torch.float64)
    total = cumulative_V[-1]
    token = int(torch.searchsorted(cumulative_V, total * uniform, right=True).item())
    if token == cumulative_V.numel():
        # Rounding carried total * uniform up to total itself: take the last possible token.
        token = int(torch.searchsorted(cumulative_V, total).item())
    return token


class NodeProbs(Protocol):
    """Target probabilities by node: ``probs[ROOT]`` after the last pending token, and so on."""

    def __getitem__(self, node: int) -> Tensor: ...


class TargetProbs:
    """Target probabilities of one row, computed for the nodes that verification visits.

    Args:
        logits_NV: logits after the root (first) and after each tree node.
        params: the distribution asked for.
    """

    def __init__(self, logits_NV: Tensor, params: SamplingParams) -> None:
        self.logits_NV = logits_NV
        self._params = params
        self._cache: dict[int, Tensor] = {}

    def __getitem__(self, node: int) -> Tensor:
        if node not in self._cache:
            self._cache[node] = logits_to_probs(self.logits_NV[node + 1], self._params)
        return self._cache[node]
