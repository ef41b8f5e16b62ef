"""Heads that read a text as a language model does: layers over something of each token.

What they predict from a token does not depend on where drafting began, so training is one causal
forward and one prediction.

Shape legend: B texts, L tokens, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foredraft.drafters.common.head import HeadSource, Prediction, TextBatch
from foredraft.drafters.common.llama_layer import LlamaLayer, RMSNorm
from foredraft.drafters.common.rows import RowsHead, following
from foredraft.models.base import ModelShape


class CausalHead(RowsHead, ABC):
    """Llama layers, a norm and output rows; a subclass says what they read.

    Args:
        shape: of the target, and of the layers.
        taps: the target's layers it reads.
        num_rows: see `RowsHead`.
        num_layers: of its own.

    Attributes:
        shift: which token the first prediction is about: see `Prediction`.
    """

    shift: ClassVar[int] = 1

    def __init__(
        self, shape: ModelShape, taps: Sequence[int], num_rows: int | None, num_layers: int
    ) -> None:
        super().__init__(shape, taps, num_rows)
        self.num_layers = num_layers
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    @abstractmethod
    def inputs(self, embeddings: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """What the first layer reads of tokens [..., E], in the dtype of the weights.

        Args:
            embeddings: of the tokens.
            taps: what the target made of them.
        """

    @torch.no_grad()
    def take(
        self, source: HeadSource, output_ids: Sequence[int] | None, layers: Sequence[int]
    ) -> None:
        """Start from these layers of the target, its final norm and its output rows."""
        self.take_output(source, output_ids)
        self.norm.weight.copy_(source.final_norm())
        for layer, index in zip(self.layers, layers, strict=True):
            layer.load_state_dict(dict(source.layer(index)))

    @property
    def config(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "num_layers": self.num_layers}

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        """One while it is trained; else all, which are the same states seen from other anchors."""
        x_BLE = self.inputs(batch.embeddings_BLE, batch.taps)
        for layer in self.layers:
            x_BLE = layer(x_BLE)
        states_BLE = self.norm(x_BLE)
        return [
            Prediction(following(states_BLE, k), self.output, shift=self.shift + k, depth=k + 1)
            for k in range(1 if self.training else depth)
        ]
