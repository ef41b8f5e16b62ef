"""Measures what a forward of a target costs on this machine (see `foredraft.core.cost`).

The rise from one token to several is what decides how many guesses pay. It differs between
machines by more than between drafters, so it is measured at load; after that the model of it
follows the steps that are run, for it also differs from minute to minute: others use the same
memory, and a virtual machine's cores move.
"""

from __future__ import annotations

import time
from itertools import accumulate

from foredraft.core.cost import Attention, CostModel, Times
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow, Target

_SIZES = (1, 2, 3, 4, 5, 8, 12, 17)
_ROUNDS = 2
_CONTEXT = 64
_LONG_CONTEXT = 1024
_SEVERAL = 8


def measure_cost(target: Target) -> CostModel:
    """What a forward costs by its tokens and its context. Takes some tenths of a second.

    The least of a few rounds counts, and times never fall with size: what is left is noise of the
    machine, which can cost speed but never text.
    """
    cache = target.cache
    context = min(_CONTEXT, target.max_context // 2)
    slot = cache.allocate()
    try:
        target.score([ScoreRow(slot, [0] * context)])
        cache.keep(slot, context, ())
        sizes = [size for size in _SIZES if context + size <= target.max_context]
        times = _measured(target, slot, sizes)
        return CostModel(times, _attention(target, slot, dict(times), context))
    finally:
        cache.free(slot)


def _attention(target: Target, slot: int, before: dict[int, float], context: int) -> Attention:
    """What a longer context adds; nothing where it cannot be had without reading a long text.

    Its entries are empty: how long attention takes does not depend on their values.
    """
    added = _LONG_CONTEXT - context
    if _SEVERAL not in before or target.max_context < _LONG_CONTEXT + _SEVERAL:
        return Attention()
    try:
        target.cache.reserve(slot, added + _SEVERAL)
        target.cache.keep(slot, added, ())
        times = dict(_measured(target, slot, [1, _SEVERAL]))
    except Exception:  # a cache that wants every entry written, or has not so much memory
        return Attention()
    one, several = (max(0.0, times[n] - before[n]) / added for n in (1, _SEVERAL))
    pair_ms = max(0.0, several - one) / (_SEVERAL - 1)
    return Attention(max(0.0, one - pair_ms), pair_ms)


def _measured(target: Target, slot: int, sizes: list[int]) -> Times:
    best = dict.fromkeys(sizes, float("inf"))
    for round_number in range(_ROUNDS + 1):
        for size in sizes:
            taken = _forward_ms(target, slot, size)
            if round_number:  # the first one warms up
                best[size] = min(best[size], taken)
    return tuple(zip(sizes, accumulate(best.values(), max), strict=True))


def _forward_ms(target: Target, slot: int, num_tokens: int) -> float:
    row = ScoreRow(slot, [0], TokenTree.chain([0] * (num_tokens - 1)))
    started = time.perf_counter()
    scores = target.score([row])
    scores.logits_NV[-1, -1].item()  # waits for a GPU
    return 1e3 * (time.perf_counter() - started)
