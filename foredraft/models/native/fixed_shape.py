"""The eager decoder in fixed shapes: bits that do not depend on what else is in the forward.

Stock libraries choose another kernel, and with it another order of additions, for another number
of rows. Here every product has the same shape, whatever is scored: linear layers take blocks of a
fixed number of tokens, and attention one token at a time over a padded number of entries. That
this is enough is not guaranteed by anyone, so `probe` tries it.

Shape legend: T tokens, E features, R tokens of one row, H query heads, G key-value heads,
C cache entries, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.core.errors import CapabilityError
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow, Target
from foredraft.models.native.eager import EagerDecoder
from foredraft.models.native.packed import Stack, as_tensor

_TOKENS = 4
"""Tokens of a block; on CPUs four bfloat16 rows cost about what one costs."""
_ENTRIES = 128
"""Attention runs over a multiple of this many entries."""


class FixedShapeDecoder(EagerDecoder):
    """Runs a `ForwardPlan` layer by layer, in blocks of fixed shape."""

    name = "fixed-shape"

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        norm = super()._norm
        if weight is None:
            return x
        return _in_blocks(x, lambda block: norm(block, weight))

    def _linear(self, x: Tensor, weight: Stack, bias: Tensor | None = None) -> Tensor:
        weight = as_tensor(weight, x.dtype)
        return _in_blocks(x, lambda block: F.linear(block, weight, bias))

    def logits(self, normed_TE: Tensor) -> Tensor:
        return _in_blocks(normed_TE, super().logits)

    def _attend(
        self, query_RHD: Tensor, keys_GCD: Tensor, values_GCD: Tensor, mask_RC: Tensor | None
    ) -> Tensor:
        rows = []
        for i, query_HD in enumerate(query_RHD):
            seen = slice(None) if mask_RC is None else mask_RC[i].nonzero()[:, 0]
            seen_keys_GND = keys_GCD[:, seen]
            keys_GND, values_GND = _padded(seen_keys_GND), _padded(values_GCD[:, seen])
            entries_N = torch.arange(keys_GND.shape[1], device=query_HD.device)
            mask_N = entries_N < seen_keys_GND.shape[1]
            rows.append(self._sees(query_HD[:, None], keys_GND, values_GND, mask_N[None])[:, 0])
        return torch.stack(rows)


def _in_blocks(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """``run`` over blocks of exactly ``_TOKENS`` along the first dimension, joined."""
    count = x.shape[0]
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, -count % _TOKENS))
    return torch.cat([run(block) for block in torch.split(padded, _TOKENS)])[:count]


def _padded(states_GND: Tensor) -> Tensor:
    return F.pad(states_GND, (0, 0, 0, -states_GND.shape[1] % _ENTRIES))


def probe(target: Target) -> None:
    """Score one text in several ways and compare the logits bit for bit.

    Raises:
        CapabilityError: they differ, so this machine's libraries cannot keep the promise.
    """
    text = [(i * 37 + 11) % min(target.vocab_size, 500) for i in range(24)]
    alone = _scored(target, text, [1] * len(text))
    for sizes in ([24], [1, 3, 8, 12], [5, 7, 2, 10]):
        if not torch.equal(alone, _scored(target, text, sizes)):
            raise CapabilityError(
                "exact=True cannot be kept here: this machine's libraries give other bits in other "
                "company, also in blocks of fixed shape. On CPU, install a C++ compiler (apt "
                "install g++) for the fused kernel, which keeps it by construction"
            )


def _scored(target: Target, text: list[int], sizes: list[int]) -> Tensor:
    """Logits [tokens, V] after each token, scored as chains of these sizes."""
    cache, parts, start = target.cache, [], 0
    slot = cache.allocate()
    try:
        for size in sizes:
            chain = TokenTree.chain(text[start + 1 : start + size])
            parts.append(target.score([ScoreRow(slot, [text[start]], chain)])[0].logits_NV)
            cache.keep(slot, 1, range(size - 1))
            start += size
    finally:
        cache.free(slot)
    return torch.cat(parts)
