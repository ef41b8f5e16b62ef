"""A native model that drafts for another one: what it says is checked, so it may be rounded.

Its head comes in two steps, and rows of it beyond the vocabulary that is shared are left out.

Shape legend: N positions whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from foredraft.core.choices import LIKELIEST
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.files.kept import NOTHING_KEPT, KeptFiles
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.copy import screen_of
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.model import draws_behind_all, scored
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.quant import GROUP_ROWS, Matrix, PackedMatrix
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import DecoderWeights


class NativeDraftModel(NativeTarget):
    """A draft model as a `foredraft.models.base.Target` with a cache of its own.

    All logits are drawn from in the forward, where the fused decoder runs it: what may win has the
    head's own logits then, all others may be estimates of the screen.

    Args:
        config, weights, args, options: see `NativeTarget`. The weights are those of `for_drafts`.
    """

    unasked_draw = LIKELIEST

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, *args: Any, **options: Any
    ) -> None:
        super().__init__(config, weights, *args, **options)
        self.vocab_size = weights.head_VE.shape[0]

    def _scored(self, rows: Sequence[ScoreRow], plan: ForwardPlan, taps: Sequence[int]) -> Scores:
        """With shortlists if all rows have one: their logits are equally many."""
        decoder = self.decoder
        if not isinstance(decoder, FusedDecoder):
            return super()._scored(rows, plan, taps)
        each = zip(rows, plan.row_wanted, strict=True)
        asked = [row.shortlist for row, wanted in each for _ in wanted]
        lists = [one for one in asked if one and decoder.leaves_out(one)]
        if len(lists) < len(asked) or len({one.num_first for one in lists}) != 1:
            return super()._scored(rows, plan, taps)
        plan.shortlists = lists
        return scored(self.decoder, plan, self.cache, draws_behind_all(rows, plan), taps)

    @classmethod
    def of(cls, target: NativeTarget, num_rows: int | None) -> NativeDraftModel:
        """A loaded model that is to draft; ``num_rows``: see `for_drafts`."""
        return cls(
            target.config,
            for_drafts(target.weights, num_rows, target.kept),
            target.new_decoder,
            target.max_context,
            target.cache.memory,
            target.kept,
            cache_dtype=target.cache.store.dtype,
        )


def for_drafts(
    weights: DecoderWeights, num_rows: int | None = None, kept: KeptFiles = NOTHING_KEPT
) -> DecoderWeights:
    """The weights of a model for `NativeDraftModel`.

    Args:
        num_rows: of its head, from the first on; None: all.
        kept: where a screen is kept between processes.
    """
    screen_VE = screen_of(weights.head_VE, kept, "draft-screen")
    head_VE = weights.head_VE
    if num_rows is not None and num_rows < head_VE.shape[0]:
        head_VE = _first_rows(head_VE, num_rows)
        if screen_VE is not None:
            first = _first_rows(screen_VE, num_rows)
            assert isinstance(first, PackedMatrix)
            screen_VE = first
    return replace(weights, head_VE=head_VE, screen_VE=screen_VE)


def _first_rows(matrix: Matrix, num_rows: int) -> Matrix:
    if isinstance(matrix, Tensor):
        return matrix[:num_rows]
    groups = -(-num_rows // GROUP_ROWS)
    return replace(matrix, packed_GCN=matrix.packed_GCN[:groups], part_rows=(num_rows,))
