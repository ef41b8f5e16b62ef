"""Measures the cost of a target's forwards on this machine (see `foredraft.core.cost`).

The rise from one token to several decides how many draft tokens pay. It differs between
machines by more than between drafters, so it is measured at load; after that the model of it
follows the steps that are run, for it also differs from minute to minute: others use the same
memory, and a virtual machine's cores move.
"""

from __future__ import annotations

import time
from itertools import accumulate
from statistics import median
from typing import Any

from foredraft.cache.kv import KVCache
from foredraft.cache.paged import Cache
from foredraft.core.cost import Attention, CostModel, Times
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow, Target, read
from foredraft.models.files.kept import KeptFiles, recipe_of, this_week

_SIZES = (1, 4, 8, 2, 3, 16, 5, 12, 17, 32, 24, 33, 48)
"""Tokens of the forwards that are timed, the most telling first: the times of one to eight decide
draft lengths. Both sides of each multiple of 16: kernels with matrix tiles take a step there."""
_NUM_TELLING = 5
"""Number of sizes that are timed before a long context is."""
_LEAST_MOST = 17
_ROUNDS, _MORE_ROUNDS, _MORE_SECONDS = 2, 8, 1.0
"""Rounds of all forwards; of a small model more, up to so many and as long as they take less time
than this: the least of two times is a tenth too much now and then, and decides draft lengths."""
_MOST_SECONDS = 2.0
"""Limit for all forwards. A large model is timed at fewer sizes; steps correct the others later."""
_CONTEXT = 64
_LONG_CONTEXT = 1024
_LONG_SIZES = (1, 8)
_STRIDE = 977
_MOST_MEASURED = 2
"""Processes that measure before the least of their times is kept."""

_Place = tuple[int, int]
"""Cache entries before a forward, and its tokens."""


def kept_cost(kept: KeptFiles, recipe: str, target: Target, max_rows: int = 1) -> CostModel:
    """The cost model from the measurements of earlier processes; else from `measure_cost`.

    A measurement beside a busy neighbour must not decide draft lengths for long. So two processes
    measure, and the least time of each size is kept for a week. The cost model follows the steps
    that are run in any case.

    Args:
        recipe: names all that the times depend on: machine, kernel, form of the weights, threads.
    """
    name = f"costs-{recipe_of(recipe, max_rows)[:8]}"
    recipe = recipe_of(recipe, max_rows, this_week())
    nothing: Any = ((), (), 0, _MOST_MEASURED)
    earlier, attention, context, num_left = kept.read_json(name, recipe) or nothing
    times: Times = tuple((size, ms) for size, ms in earlier)
    if num_left:
        measured, attention, context = _measure(target, max_rows)
        times = _least(measured, times)
        kept.keep_json(name, recipe, [times, attention, context, num_left - 1])
    return CostModel(times, Attention(*attention), context)


def _least(times: Times, others: Times) -> Times:
    """The least time of each size that either measurement has; none falls with size."""
    ms_of = dict(sorted((*times, *others), reverse=True))  # of a size the least comes last
    return tuple(zip(ms_of, accumulate(ms_of.values(), min), strict=True))[::-1]


def measure_cost(target: Target, max_rows: int = 1) -> CostModel:
    """Measure a forward by its tokens and its context. It takes at most two seconds.

    The least of a few rounds counts, and times never fall with size: the remaining noise of the
    machine can cost speed but never changes text. The cost of a longer context is measured if the
    cache can be filled without reading a long text (`KVCache.fill`): its entries are empty, because
    the time of attention does not depend on their values.

    Args:
        max_rows: most rows that will be in a forward, each perhaps with a few drafts.
    """
    times, attention, context = _measure(target, max_rows)
    return CostModel(times, Attention(*attention), context)


def _measure(target: Target, max_rows: int) -> tuple[Times, tuple[float, float], int]:
    """Times, the cost of a cache entry and of a pair of entry and token, and the times' context."""
    cache = target.cache
    context = min(_CONTEXT, target.max_context // 2)
    most = min(max(_LEAST_MOST, 3 * max_rows), target.max_context - context)
    sizes = [size for size in _SIZES if size <= most]
    places = [(context, size) for size in sizes]
    slot = cache.allocate()
    try:
        if _fits_a_long_context(cache, slot):
            places[_NUM_TELLING:_NUM_TELLING] = [(_LONG_CONTEXT, size) for size in _LONG_SIZES]
        read(target, slot, _text(target, context))
        best = _measured(target, slot, places)
    finally:
        cache.free(slot)
    times = tuple((size, best[context, size]) for size in sizes if (context, size) in best)
    return _least(times, ()), _attention(best, context), context


def forward_ms(target: Target, num_tokens: int) -> float:
    """Milliseconds of one forward of ``num_tokens`` tokens, the median of a few; not cached."""
    cache, context = target.cache, min(_CONTEXT, target.max_context // 2)
    slot = cache.allocate()
    try:
        read(target, slot, _text(target, context))
        return median(_forward_ms(target, slot, num_tokens) for _ in range(5))
    finally:
        cache.free(slot)


def _fits_a_long_context(cache: Cache, slot: int) -> bool:
    if not isinstance(cache, KVCache):
        return False
    try:
        cache.reserve(slot, _LONG_CONTEXT + max(_LONG_SIZES))
    except (ValueError, MemoryError, RuntimeError):  # a short context, or no memory for a long one
        return False
    return True


def _attention(best: dict[_Place, float], context: int) -> tuple[float, float]:
    """The cost of an entry of a longer context, and of entry and token; 0: not measured."""
    if any((_LONG_CONTEXT, size) not in best for size in _LONG_SIZES):
        return 0.0, 0.0
    one, several = (
        max(0.0, best[_LONG_CONTEXT, n] - best[context, n]) / (_LONG_CONTEXT - context)
        for n in _LONG_SIZES
    )
    pair_ms = max(0.0, several - one) / (_LONG_SIZES[1] - _LONG_SIZES[0])
    return max(0.0, one - pair_ms), pair_ms


def _measured(target: Target, slot: int, places: list[_Place]) -> dict[_Place, float]:
    """Milliseconds at each place that there is time for, at least the first two.

    All in turns, so that a slow moment does not make one dear. On a GPU each place is warmed up:
    its first forward compiles kernels and is recorded, which takes up to seconds.
    """
    best: dict[_Place, float] = {}
    parts = target.capabilities.parts
    on_gpu = parts is not None and parts.device.type != "cpu"
    for context, size in places if on_gpu else places[:1]:
        _moved_to(context, target.cache, slot)
        _forward_ms(target, slot, size)
    started = time.perf_counter()
    for round_number in range(_MORE_ROUNDS):
        if round_number >= _ROUNDS and time.perf_counter() - started > _MORE_SECONDS:
            break
        for number, (context, size) in enumerate(places):
            is_late = time.perf_counter() - started > _MOST_SECONDS
            if is_late and (number > 1 or (context, size) in best):
                return best
            if _moved_to(context, target.cache, slot):
                _forward_ms(target, slot, 1)  # the next would find other things in the processor
            taken = _forward_ms(target, slot, size)
            best[context, size] = min(best.get((context, size), taken), taken)
    return best


def _moved_to(context: int, cache: Cache, slot: int) -> bool:
    """Make the slot hold ``context`` entries; returns whether it held another number."""
    missing = context - cache.length(slot)
    if missing < 0:
        cache.truncate(slot, context)
    elif missing > 0:
        assert isinstance(cache, KVCache)
        cache.fill(slot, missing)
    return missing != 0


def _text(target: Target, num_tokens: int) -> list[int]:
    """Tokens that differ: unlike ones touch more experts of a mixture than like ones do."""
    return [_STRIDE * i % target.vocab_size for i in range(num_tokens)]


def _forward_ms(target: Target, slot: int, num_tokens: int) -> float:
    root, *nodes = _text(target, num_tokens)
    row = ScoreRow(slot, [root], TokenTree.chain(nodes))
    started = time.perf_counter()
    scores = target.score([row])
    scores.logits_NV[-1, -1].item()  # waits for a GPU
    return 1e3 * (time.perf_counter() - started)
