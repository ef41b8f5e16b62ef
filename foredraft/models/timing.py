"""How long a forward of the target takes by the number of its tokens, measured at load.

The rise from one token to several is what decides how many guesses pay, and it differs between
machines by more than between drafters.
"""

from __future__ import annotations

import time
from itertools import accumulate

import torch

from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow, Target

_SIZES = (1, 2, 4, 5, 8, 12, 17)
_ROUNDS = 2
_CONTEXT = 64


def measure_forward_ms(target: Target) -> tuple[tuple[int, float], ...]:
    """(tokens, milliseconds) of one row's forward, after a short text.

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
