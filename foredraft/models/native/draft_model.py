"""A native model that drafts for another one: what it says is checked, so it may be rounded.

Its head comes in two steps, its small forwards are described once, and rows of its head beyond the
vocabulary that it shares are left out.

Shape legend: N positions whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.blocks import in_blocks
from foredraft.core.choices import DrawKey
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.files.kept import NOTHING_KEPT, KeptFiles
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.copy import prepared_chain, screen_of
from foredraft.models.native.cpu import MOST_TOKENS, PreparedChain
from foredraft.models.native.quant import GROUP_ROWS, Matrix, PackedMatrix
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import DecoderWeights

_LIKELIEST = DrawKey(0, 0, 0.0)


class NativeDraftModel(NativeTarget):
    """A draft model as a `foredraft.models.base.Target` with a cache of its own.

    All logits are drawn from in the forward, where the fused decoder runs it: what may win has the
    head's own logits then, all others may be estimates of the screen.

    Args:
        config, weights, args, options: see `NativeTarget`. The weights are those of `for_drafts`.
    """

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, *args: Any, **options: Any
    ) -> None:
        super().__init__(config, weights, *args, **options)
        self.vocab_size = weights.head_VE.shape[0]
        self._chain = prepared_chain(self.decoder, self.cache)

    @torch.no_grad()
    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        if self._chain and len(rows) == 1 and not taps and _is_small(rows[0]):
            return self._score_chain(self._chain, rows[0])
        return super().score([replace(row, draw=row.draw or _LIKELIEST) for row in rows], taps)

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

    def apart(self, num_tokens: int) -> NativeDraftModel:
        dtype = self.cache.store.dtype
        memory = in_blocks(num_tokens) * self.config.kv_shape.bytes_per_token(dtype)
        return NativeDraftModel(
            *(self.config, self.weights, self.new_decoder, num_tokens, memory), cache_dtype=dtype
        )

    def _score_chain(self, chain: PreparedChain, row: ScoreRow) -> Scores:
        """A few tokens of one row and a chain behind them, with little around the kernel."""
        tokens, start = (*row.pending, *row.tree.tokens), self.cache.length(row.slot)
        if max(tokens) >= self.config.vocab_size:  # a target may have more rows
            raise IndexError(f"token {max(tokens)}; the draft model has {self.config.vocab_size}")
        self.cache.reserve(row.slot, len(tokens))
        self.cache.will_write(row.slot, len(tokens))
        num_wanted = 1 + len(row.tree)
        logits_NV, draws = chain.run(row.slot, tokens, start, row.draw or _LIKELIEST, num_wanted)
        return Scores(logits_NV, (range(num_wanted),), {}, (range(len(tokens)),), draws)


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


def _is_small(row: ScoreRow) -> bool:
    num_tokens = len(row.pending) + len(row.tree)
    return row.wants_logits and row.tree.is_chain and num_tokens <= MOST_TOKENS
