"""A llama layer trained as it drafts: all anchors of a text at once, one draft step after another.

Shape legend: B texts, L tokens (anchors), E hidden size, H query heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.common.llama_layer import LlamaLayer


class AnchoredAttention:
    """The state of one unrolled layer (training-time test, arXiv 2503.01840).

    In step s (from 0) the query of anchor i stands at position i + s. It sees the entries of the
    text up to i, which all anchors share, and those that its own earlier steps left.
    """

    def __init__(self, layer: LlamaLayer) -> None:
        self._layer = layer
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, x_BLE: Tensor, step: int) -> Tensor:
        positions_L = torch.arange(x_BLE.shape[1], device=x_BLE.device) + step
        queries, keys, values = self._layer.heads(x_BLE, positions_L)
        repeat = queries.shape[1] // keys.shape[1]
        self._keys.append(keys.repeat_interleave(repeat, 1))
        self._values.append(values.repeat_interleave(repeat, 1))
        if step:
            return self._layer.finish(x_BLE, self._attend(queries))
        attended = F.scaled_dot_product_attention(
            queries, self._keys[0], self._values[0], is_causal=True
        )
        return self._layer.finish(x_BLE, attended)

    def _attend(self, queries_BHLD: Tensor) -> Tensor:
        length, scale = queries_BHLD.shape[2], queries_BHLD.shape[3] ** -0.5
        queries_BHLD = queries_BHLD * scale
        scores = queries_BHLD @ self._keys[0].mT + behind_anchor(queries_BHLD, length)
        own = [(queries_BHLD * keys).sum(-1, keepdim=True) for keys in self._keys[1:]]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        attended = weights[..., :length] @ self._values[0]
        for i, values in enumerate(self._values[1:]):
            attended = attended + weights[..., length + i, None] * values
        return attended


def behind_anchor(like: Tensor, length: int) -> Tensor:
    """What the scores of entries behind each anchor are lowered by; [L, L]."""
    return like.new_full((length, length), -torch.inf).triu(1)
