"""A copy of the target's own layers in few bits, which drafts on the target's own cache.

The copy reads the target's cache entries of the committed text as they are. It writes its own
behind them, where the target's forward will write the same tokens anew: no entry of the copy is
ever committed. So a copy has no cache of its own and reads no prompt (QSpec, arXiv 2410.11305).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from foredraft.cache.kv import KVCache
from foredraft.cache.memory import available_memory
from foredraft.core.draws import DrawRows, Wanted
from foredraft.core.errors import ModelLoadError
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.native.decoder import Decoder
from foredraft.models.native.plan import ForwardPlan, plan_forward


class LowBitCopy:
    """See `foredraft.models.base.LowBitCopy`.

    Args:
        decoder: runs the copy's weights.
        cache: the target's.
        bits: of a weight of the layers.
        num_bytes: memory that its weights take beside the target's.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, bits: int, num_bytes: int) -> None:
        self._decoder, self._cache = decoder, cache
        self.bits, self.num_bytes = bits, num_bytes

    @torch.no_grad()
    def score(
        self, rows: Sequence[ScoreRow], starts: Sequence[int], taps: Sequence[int] = ()
    ) -> Scores:
        plan = plan_forward(rows, starts)
        for span in plan.rows:
            num_behind = span.entries.stop - self._cache.length(span.slot)
            self._cache.reserve(span.slot, num_behind)
            self._cache.will_write(span.slot, num_behind)
        if self._decoder.draws:
            plan = replace(plan, draws=draws_of(rows, plan))
        logits_NV, tapped = self._decoder.forward(plan, self._cache, taps)
        draws = plan.draws.found() if plan.draws else None
        heads, tokens = zip(*((span.heads, span.tokens) for span in plan.rows), strict=True)
        return Scores(logits_NV, heads, tapped, tokens, draws)


def check_fits_memory(num_bytes: int, bits: int) -> None:
    """Refuse a copy before its memory is taken.

    Raises:
        ModelLoadError: less is available.
    """
    available = available_memory()
    if num_bytes > available:
        raise ModelLoadError(
            f"a copy of the target in {bits} bits takes {num_bytes / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB of memory are available; use another drafter, or free memory"
        )


def draws_of(rows: Sequence[ScoreRow], plan: ForwardPlan) -> DrawRows | None:
    """What the rows want drawn; None: nothing."""
    wanted = [
        Wanted(span.heads.start, *row.draw)
        for row, span in zip(rows, plan.rows, strict=True)
        if row.draw is not None and span.heads
    ]
    return DrawRows(wanted) if wanted else None
