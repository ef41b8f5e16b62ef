"""From logits to the distribution the user asked for.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from foredraft.core import draws
from foredraft.core.draws import Array, DrawRow, Key
from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.params import SamplingParams

_BLOCK = 128
"""Numbers per block: `largest` compares the maxima of blocks first."""
_NO_FILTERS = SamplingParams()

_COLDEST = {dtype: torch.finfo(dtype).tiny * 16 for dtype in (torch.float32, torch.float64)}
"""The lowest temperature by dtype; lower ones are raised to it. Its inverse is finite in the dtype,
so that a tiny temperature does not give 0 * inf."""


def scale_of(params: SamplingParams) -> float:
    """1 / temperature; 0: the likeliest token."""
    return params.temperature and 1.0 / max(params.temperature, _COLDEST[torch.float32])


@dataclass(frozen=True)
class Law:
    """A distribution over tokens: token v has weight ``exp(scale * logits_V[v])``.

    A draw with shared noise needs the logits and the cut alone. Filtered logits and probabilities
    are computed on first use; greedy and seeded requests never use them.

    Attributes:
        given: float logits before top-k, top-p and min-p, [V], or [N, V] with a ``row``; -inf is a
            token that cannot occur.
        scale: 1 / temperature; None puts everything on ``token``.
        token: the likeliest token, of equal ones the first.
        cut: threshold of the filters: tokens with a smaller logit cannot occur.
        drawn: the token that the target draws from it, if it is known already.
        chance: of ``drawn``, as `foredraft.core.choices.chance_alike` has it; None: not computed.
        row: of ``given``; a law whose token is drawn already is seldom looked at.
    """

    given: Tensor
    scale: float | None
    token: int
    cut: float = -math.inf
    drawn: int | None = None
    chance: float | None = None
    row: int | None = None

    @classmethod
    def of_probs(cls, probs_V: Tensor) -> Law:
        """The law with these probabilities (or weights)."""
        return cls(probs_V.log(), 1.0, int(probs_V.argmax()))

    @property
    def given_V(self) -> Tensor:
        return self.given if self.row is None else self.given[self.row]

    @cached_property
    def logits_V(self) -> Tensor:
        """Logits [V] after all filters, in the dtype given; -inf is a token that cannot occur."""
        if self.cut == -math.inf:
            return self.given_V
        values_V = _on_host(self.given_V)
        return torch.from_numpy(np.where(values_V < self.cut, -math.inf, values_V))

    @cached_property
    def probs_V(self) -> Tensor:
        """Probabilities [V] in the dtype of the logits."""
        if self.scale is None:
            one_hot_V = torch.zeros_like(self.logits_V)
            one_hot_V[self.token] = 1.0
            return one_hot_V
        weights_V = _weights(_on_host(self.logits_V), self.token, self.scale)
        return torch.from_numpy(weights_V / weights_V.sum())


def law_of(logits_V: Tensor, params: SamplingParams) -> Law:
    """The distribution that ``params`` asks for at one position.

    Works on one row at a time on purpose: the bits of a result then cannot depend on how many
    rows were scored together. All of it runs on the host and on one thread: torch would wake its
    pool of threads for a vocabulary, which then spins on the CPUs of the next forward.

    float32 logits are filtered by compiled code where there is a compiler (kernels/filter.h), all
    others in numpy. The two have exp functions of their own: a token whose weight is within
    rounding of a threshold may be kept by one and not by the other. In one process logits of one
    dtype always go the same way, with and without drafts.

    Args:
        logits_V: float32 or float64 logits; -inf is a token that cannot occur.

    Raises:
        NonFiniteScoresError: the largest logit is NaN or infinite.
    """
    if params.temperature == 0.0:
        return Law(logits_V, None, _likeliest(logits_V))
    here_V = logits_V.detach().cpu()
    scale = 1.0 / max(params.temperature, _COLDEST[here_V.dtype])
    return Law(here_V, scale, *_likeliest_and_cut(here_V, params, scale))


def _likeliest(logits_V: Tensor) -> int:
    if logits_V.device.type == "cpu":
        return _likeliest_and_cut(logits_V.detach(), _NO_FILTERS, 1.0)[0]
    token = int(logits_V.argmax().item())  # its number comes to the host, and no logits
    check_finite(float(logits_V[token]), logits_V.numel())
    return token


def _likeliest_and_cut(logits_V: Tensor, params: SamplingParams, scale: float) -> tuple[int, float]:
    """The first of the largest logits, and the smallest logit that passes the filters.

    It runs almost no Python: after a forward, the CPU's caches no longer hold the interpreter.
    """
    size = logits_V.numel()
    if logits_V.dtype is torch.float32:
        logits_V = logits_V.contiguous()
        filters = (min(params.top_k, size), params.top_p, params.min_p, scale)
        found = draws.filter_cut(logits_V.data_ptr(), size, *filters)
        if found is not None:
            return found
    values_V: Array = logits_V.numpy()
    token = int(values_V.argmax())  # of a NaN, if there is one
    check_finite(float(values_V[token]), size)
    return token, _cut(values_V, token, params, scale)


def _cut(values_V: Array, token: int, params: SamplingParams, scale: float) -> float:
    cut = -math.inf
    if 0 < params.top_k < values_V.size:
        cut = float(np.partition(values_V, -params.top_k)[-params.top_k])
        values_V = np.where(values_V < cut, -math.inf, values_V)
    if params.top_p < 1.0 or params.min_p > 0.0:
        weights_V = _weights(values_V, token, scale)
        least = params.min_p  # the largest weight is 1
        if params.top_p < 1.0:
            least = max(least, _top_p_threshold(weights_V, params.top_p))
        cut = max(cut, float(values_V[weights_V >= least].min()))
    return cut


def _on_host(logits_V: Tensor) -> Array:
    values_V: Array = logits_V.detach().cpu().numpy()
    return values_V


def _weights(values_V: Array, token: int, scale: float) -> Array:
    """Probabilities up to a factor; that of ``token``, the likeliest, is 1.

    The largest logit is subtracted before scaling, so that nothing overflows.
    """
    with np.errstate(over="ignore"):  # far below the largest is -inf
        weights_V: Array = np.exp((values_V - values_V[token]) * scale)
    return weights_V


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


def _top_p_threshold(weights_V: Array, top_p: float) -> float:
    total = float(weights_V.sum(dtype=np.float64))
    # Those below this are too few in all to complete the nucleus, so they need no sorting.
    least = 0.5 * (1.0 - top_p) * total / weights_V.size
    descending = np.sort(weights_V[weights_V >= least])[::-1]
    mass_before = descending.cumsum(dtype=np.float64) - descending
    inside = int(np.searchsorted(mass_before, top_p * total))
    return float(descending[max(inside, 1) - 1])


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


def draw_rows(logits_NV: Tensor, keys: Sequence[tuple[int, Key]]) -> list[Law | None]:
    """The laws of these rows, which are nothing but scaled logits, with the tokens drawn from them.

    The tokens equal those of `foredraft.core.noise.gumbel_argmax` for each row alone.

    Args:
        logits_NV: float32 or float64 on CPU.
        keys: numbers of rows, each with its key.

    Returns:
        None where the largest logit is not finite or one is NaN; without the compiled half also
        where the key has a scale: there is nothing to be gained then.
    """
    found = draws.drawn_rows(_on_host(logits_NV), keys)
    if found is not None:
        return drawn_laws(logits_NV, found)
    return [None if scale else greedy_law(logits_NV[row]) for row, (_, _, scale) in keys]


def drawn_laws(logits_NV: Tensor, rows: Iterable[DrawRow]) -> list[Law | None]:
    """The laws that compiled code has drawn from; None where the logits are not finite."""
    return [
        None
        if row.token < 0
        else Law(
            *(logits_NV, row.scale or None, row.best),
            drawn=row.token,
            chance=row.chance or None,
            row=row.row,
        )
        for row in rows
    ]


def greedy_law(logits_V: Tensor) -> Law | None:
    """All mass on the likeliest token; None where the largest logit is not finite."""
    token = int(logits_V.argmax())  # of a NaN, if there is one
    is_finite = math.isfinite(float(logits_V[token]))
    return Law(logits_V, None, token, drawn=token) if is_finite else None


NodeLaws: TypeAlias = Callable[[int], Law]
"""The target's law after a node, ``laws(ROOT)`` after the last pending token. It may raise: a node
with NaN logits has no law. So only nodes that verification reaches are looked up."""


def largest(values_V: Array, count: int) -> list[int]:
    """Indices of the ``count`` largest numbers, largest first; of equal ones the first.

    It neither sorts all numbers nor uses torch's threads: once woken, these spin for a while on the
    CPUs that the next forward needs.
    """
    count = min(count, values_V.size)
    if count == 0:
        return []
    candidates = np.flatnonzero(values_V >= _at_most_kth(values_V, count))
    order = np.argsort(-values_V[candidates], kind="stable")[:count]
    return [int(index) for index in candidates[order]]


def _at_most_kth(values_V: Array, k: int) -> Any:
    """A lower bound of the k-th largest number, with few numbers above it.

    The maxima of ``k`` blocks reach it, so at least ``k`` numbers do.
    """
    num_blocks = values_V.size // _BLOCK
    if num_blocks <= k:
        return -np.inf
    maxima = values_V[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
    return np.partition(maxima, -k)[-k]
