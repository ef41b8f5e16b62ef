"""From logits to the distribution the user asked for, and from a distribution to a token.

Shape legend: N nodes (the root and the draft tokens), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from foredraft.core.errors import ConfigError, NonFiniteScoresError, unknown
from foredraft.core.rng import SEED_BITS

_SHORTLIST = 512
"""Top-p first looks at this many candidates; a full sort of the vocabulary is rarely needed."""


@dataclass(frozen=True)
class SamplingParams:
    """What distribution to draw from and when to stop.

    Filters apply in the order temperature, top-k, top-p, min-p, each on the renormalised result
    of the one before (the order of transformers). Tokens that tie with the last one kept are kept
    too, so the outcome never depends on a sort's tie-breaking.

    Attributes:
        temperature: 0 is greedy: all probability on the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass, in (0, 1].
        min_p: drop tokens below this fraction of the most likely one's probability, in [0, 1].
        seed: 0 <= seed < 2**64; None draws a fresh one, reported in the result.
        max_tokens: most tokens to generate, at least 1.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end generation, beside the model's own end-of-text ids.
        ignore_eos: go on past the model's own end-of-text ids.
        coupling: "seeded" (the same seed gives the same text with and without speculation) or
            "drawn" (draft models draw their tokens: higher acceptance at high temperature, the
            same distribution, another text for the same seed).
        prediction: text that the reply is expected to repeat, for drafters that use one. It
            never changes the reply.

    Raises:
        ConfigError: a value is out of range or of the wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    coupling: Literal["seeded", "drawn"] = "seeded"
    prediction: str | None = None

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, low=0.0)
        _check_real("top_p", self.top_p, low=0.0, high=1.0)
        _check_real("min_p", self.min_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise ConfigError("top_p is 0, which keeps no token; use a value in (0, 1]")
        _check_int("top_k", self.top_k, low=0)
        _check_int("max_tokens", self.max_tokens, low=1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=2**SEED_BITS - 1)
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        stop_token_ids = _tuple("stop_token_ids", self.stop_token_ids)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop strings must be non-empty text, not {text!r}")
        for token in stop_token_ids:
            _check_int("stop_token_ids", token, low=0)
        if self.coupling not in ("seeded", "drawn"):
            raise unknown("coupling", str(self.coupling), ("seeded", "drawn"))
        if not isinstance(self.prediction, str | None):
            raise ConfigError(f"prediction must be text, not {self.prediction!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    @classmethod
    def of(cls, **options: Any) -> SamplingParams:
        """Build from keyword options; an unknown one is an error naming the nearest."""
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise unknown("sampling option", name, known)
        return cls(**options)


def _check_real(name: str, value: object, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be {_range(low, high)}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise ConfigError(f"{name} must be a list, not {values!r}")
    return tuple(values)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if type(value) is not int:
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is {value}; it must be {_range(low, high)}")


def _range(low: float, high: float | None) -> str:
    return f"at least {low}" if high is None or high == math.inf else f"between {low} and {high}"


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
