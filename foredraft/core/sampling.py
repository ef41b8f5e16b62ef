"""From logits to the distribution the user asked for.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.params import SamplingParams

_SHORTLIST = 512
"""Top-p first looks at this many candidates; a full sort of the vocabulary is rarely needed."""


@dataclass(frozen=True)
class Law:
    """A distribution over tokens: token v has weight ``exp(scale * logits_V[v])``.

    What is drawn with shared noise needs the logits alone; probabilities are computed when asked
    for, which greedy and seeded requests never do.

    Attributes:
        logits_V: float logits after all filters; -inf is a token that cannot occur.
        scale: 1 / temperature; None puts everything on ``token``.
        token: the likeliest token, of equal ones the first.
    """

    logits_V: Tensor
    scale: float | None
    token: int

    @classmethod
    def of_probs(cls, probs_V: Tensor) -> Law:
        """The law with these probabilities (or weights)."""
        return cls(probs_V.log(), 1.0, int(probs_V.argmax()))

    @cached_property
    def probs_V(self) -> Tensor:
        """Probabilities [V] in the dtype of the logits."""
        if self.scale is None:
            one_hot_V = torch.zeros_like(self.logits_V)
            one_hot_V[self.token] = 1.0
            return one_hot_V
        return tempered(self.logits_V, self.logits_V[self.token], self.scale).softmax(0)


def law_of(logits_V: Tensor, params: SamplingParams) -> Law:
    """The distribution that ``params`` asks for at one position.

    Works on one row at a time on purpose: the bits of a result then cannot depend on how many
    rows were scored together.

    Args:
        logits_V: float32 or float64 logits; -inf is a token that cannot occur.

    Raises:
        NonFiniteScoresError: the largest logit is NaN or infinite.
    """
    token = argmax(logits_V)
    best = logits_V[token]
    check_finite(best.item(), logits_V.numel())
    if params.temperature == 0.0:
        return Law(logits_V, None, token)
    # No larger than the dtype can hold: a tiny temperature must not end in 0 * inf.
    scale = 1.0 / max(params.temperature, torch.finfo(logits_V.dtype).tiny * 16)
    if 0 < params.top_k < logits_V.numel():
        kth = logits_V.topk(params.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, -math.inf)
    if params.top_p < 1.0 or params.min_p > 0.0:
        probs_V = tempered(logits_V, best, scale).softmax(0)
        least = params.min_p * probs_V.max()
        if params.top_p < 1.0:
            least = torch.maximum(least, _top_p_threshold(probs_V, params.top_p))
        logits_V = logits_V.masked_fill(probs_V < least, -math.inf)
    return Law(logits_V, scale, token)


def tempered(logits_V: Tensor, best: Tensor, scale: float) -> Tensor:
    """Log weights, the largest of them 0. Subtracted before scaling, so that nothing overflows."""
    return (logits_V - best) * scale


def logits_to_probs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [V] of `law_of`; one-hot at temperature 0."""
    return law_of(logits_V, params).probs_V


def check_finite(best: float, num_logits: int) -> None:
    """Refuse a position whose largest logit is ``best``.

    Raises:
        NonFiniteScoresError: it is NaN or infinite.
    """
    if not math.isfinite(best):
        raise NonFiniteScoresError(
            f"the largest of {num_logits} logits is {best}; the model's weights or activations "
            "are not finite here"
        )


def argmax(logits_V: Tensor) -> int:
    """The first of the largest; a NaN counts as larger than anything."""
    if logits_V.device.type == "cpu":
        return int(logits_V.detach().numpy().argmax())  # a tenth of the time that torch takes
    return int(logits_V.argmax().item())


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


class NodeLaws(Protocol):
    """The target's laws by node: ``laws[ROOT]`` after the last pending token, and so on.

    Looking one up may raise: a node with NaN logits has no law. So nobody looks at a node that
    verification does not reach.
    """

    def __getitem__(self, node: int) -> Law: ...
