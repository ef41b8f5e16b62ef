"""Decoder layer with precomputed Q, K and V: draft heads build them from several inputs.

Shape legend: T tokens of the forward, N wanted logits, E hidden size, Q columns of queries, keys
and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.eager import EagerDecoder, Run
from foredraft.models.native.weights import DecoderWeights


class HandedDecoder(EagerDecoder):
    """Runs one layer on inputs [T, E + Q]: the residual input beside queries, keys and values.

    Args:
        config: of the layer.
        weights: of the layer and the head; those of queries, keys and values are not looked at.
        has_norm: whether there is a final norm.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, has_norm: bool) -> None:
        super().__init__(config, weights)
        self._has_norm = has_norm

    def _run_layers(
        self, run: Run, hidden_TE: Tensor, layers: Iterable[int], taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        size = self._config.hidden_size
        hidden_TE, qkv = hidden_TE[:, :size], hidden_TE[:, size:]
        (index,) = layers
        layer = self._weights.layers[index]
        hidden_TE = hidden_TE + self._attended(run, index, layer, qkv)
        hidden_TE = hidden_TE + self._mlp(layer, hidden_TE)
        return hidden_TE, {index: hidden_TE}

    def _head(self, hidden_NE: Tensor) -> Tensor:
        return super()._head(hidden_NE) if self._has_norm else self.logits(hidden_NE)
