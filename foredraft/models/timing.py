"""How long a forward of the target takes by the number of its tokens.

The rise from one token to several is what decides how many guesses pay. It differs between
machines by more than between drafters, and on one machine from minute to minute: others use the
same memory, and a virtual machine's cores move. So it is measured, and then followed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch

from foredraft.core.tree import TokenTree
from foredraft.models.base import RowScores, ScoreRow, Target

_SIZES = (1, 2, 3, 4, 5, 8, 12, 17)
_ROUNDS = 2
_CONTEXT = 64

_SHARPNESS = 6.0
_STEP = 0.1
_MOST = 0.3

Times = tuple[tuple[int, float], ...]
"""(tokens, milliseconds), by rising tokens."""


class ForwardTimes:
    """Times of a one-row forward: measured when first asked for, then kept up to date.

    Called, it gives the times as of now.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._roofline: Roofline | None = None
        self._times: Times = ()
        self._shares: Times = ()  # measured times in those of the roofline measured with them

    def __call__(self) -> Times:
        if self._roofline is None:
            self._times = measure_forward_ms(self._target)
            self._roofline = Roofline.through(self._times)
            self._shares = tuple((n, ms / self._roofline.ms(n)) for n, ms in self._times)
        return self._times

    def observe(self, num_tokens: int, ms: float) -> None:
        """A forward took this long. Does nothing before times were asked for."""
        if self._roofline is None:
            return
        self._roofline = now = self._roofline.moved(num_tokens, ms)
        self._times = tuple((size, share * now.ms(size)) for size, share in self._shares)

    def watch(self, target: Target) -> Target:
        """A target that reports its decoding steps here; everything else is the target's own."""
        return cast(Target, _WatchedTarget(target, self))


@dataclass(frozen=True)
class Roofline:
    """A forward reads all weights, which takes ``read_ms``, and multiplies them with n tokens.

    It takes about as long as the longer of the two: ``(read^p + multiply(n)^p)^(1/p)``, with a
    corner as round as times on CPUs show. (The roofline of S. Williams et al., 2009.)

    Attributes:
        read_ms: whatever the number of tokens.
        base_ms, token_ms: multiplying takes ``base_ms + n * token_ms``.
    """

    read_ms: float
    base_ms: float
    token_ms: float

    @classmethod
    def through(cls, times: Times) -> Roofline:
        """One that fits measured times: the first is all reading, the last two all multiplying."""
        (small, before), (large, last) = times[-2:] if len(times) > 1 else times * 2
        token_ms = (last - before) / (large - small) if large > small else 0.0
        return cls(times[0][1], max(0.0, last - large * token_ms), token_ms)

    def ms(self, num_tokens: int) -> float:
        read, multiply = self._parts(num_tokens)
        return float(max(1e-6, (read + multiply) ** (1.0 / _SHARPNESS)))

    def moved(self, num_tokens: int, ms: float) -> Roofline:
        """A little closer to what was observed, mostly in the part that forward was bound by."""
        read, multiply = self._parts(num_tokens)
        change = max(-_MOST, min(_MOST, ms / self.ms(num_tokens) - 1.0)) * _STEP
        share = read / max(read + multiply, 1e-30)
        slower = 1.0 + change * (1.0 - share)
        return replace(
            self,
            read_ms=self.read_ms * (1.0 + change * share),
            base_ms=self.base_ms * slower,
            token_ms=self.token_ms * slower,
        )

    def _parts(self, num_tokens: int) -> tuple[float, float]:
        """Both to the power of p."""
        multiply_ms = self.base_ms + num_tokens * self.token_ms
        return self.read_ms**_SHARPNESS, multiply_ms**_SHARPNESS


class _WatchedTarget:
    """See `ForwardTimes.watch`. GPUs are not waited for, so their forwards are not observed."""

    def __init__(self, target: Target, times: ForwardTimes) -> None:
        self._target, self._times = target, times

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> list[RowScores]:
        started = time.perf_counter()
        scores = self._target.score(rows, taps)
        if len(rows) == 1 and len(rows[0].pending) == 1 and not scores[0].logits_NV.is_cuda:
            ms = 1e3 * (time.perf_counter() - started)
            self._times.observe(1 + len(rows[0].tree), ms)
        return scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def measure_forward_ms(target: Target) -> Times:
    """Times of one row's forward after a short text, by the number of its tokens.

    Some tenths of a second. The least of a few rounds counts, and times never fall with size:
    what is left is noise of the machine, which can cost speed but never text.
    """
    cache = target.cache
    context = min(_CONTEXT, target.max_context // 2)
    sizes = [size for size in _SIZES if context + size <= target.max_context]
    slot = cache.allocate()
    try:
        target.score([ScoreRow(slot, [0] * context)])
        cache.keep(slot, context, ())
        best = dict.fromkeys(sizes, float("inf"))
        for round_number in range(_ROUNDS + 1):
            for size in sizes:
                taken = _forward_ms(target, slot, size)
                if round_number:  # the first one warms up
                    best[size] = min(best[size], taken)
    finally:
        cache.free(slot)
    return tuple(zip(sizes, accumulate(best.values(), max), strict=True))


def _forward_ms(target: Target, slot: int, num_tokens: int) -> float:
    row = ScoreRow(slot, [0], TokenTree.chain([0] * (num_tokens - 1)))
    started = time.perf_counter()
    scores = target.score([row])
    if scores[0].logits_NV.is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)
