"""How a `HiddenHeadModule` learns.

Shape legend: E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.train.heads.base import (
    AnchoredAttention,
    HeadTraining,
    Prediction,
    TextBatch,
    unrolled,
)
from foredraft.train.target import TrainingTarget


class HiddenHeadTraining(HeadTraining[HiddenHeadModule]):
    """See the module docstring."""

    def take_layers(self, source: TrainingTarget) -> None:
        module = self.module
        # Logits of about 1: a layer that knows nothing yet must not be sure of anything.
        module.norm.weight.fill_(1.0 / float(module.rows.norm(dim=1).mean()))
        module.layer.load_state_dict(dict(source.layer(-1)))

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        module, attention = self.module, AnchoredAttention(self.module.layer)

        def step(k: int, embeddings: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            if k == 1:
                joined = self._of_taps([batch.taps[layer] for layer in module.taps])
            else:  # the layer's own output one token earlier
                joined = module.join_own(module.own_norm(state))
            joined = joined + module.join_embedding(module.embedding_norm(embeddings))
            x = attention.step(joined, k - 1)
            return module.norm(x), x

        return unrolled(batch, depth, module.rows, batch.embeddings_BLE, step)

    def _of_taps(self, taps: Sequence[Tensor]) -> Tensor:
        """Part of the input [..., E] that the target's hidden states make, one for each layer."""
        normed = [norm(x) for norm, x in zip(self.module.tap_norms, taps, strict=True)]
        joined: Tensor = self.module.join_taps(torch.cat(normed, -1))
        return joined


TRAINING = HiddenHeadTraining
