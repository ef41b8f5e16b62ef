"""How an `MtpModule` learns.

Shape legend: B texts, L tokens, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.drafters.heads.mtp import MtpModule
from foredraft.train.heads.base import (
    AnchoredAttention,
    HeadTraining,
    Prediction,
    TextBatch,
    unrolled,
)
from foredraft.train.target import TrainingTarget


class MtpTraining(HeadTraining[MtpModule]):
    """See the module docstring."""

    def take_layers(self, source: TrainingTarget) -> None:
        """Start from the target's last layer and norm, passing the state through."""
        module, size = self.module, source.shape.hidden_size
        module.target_norm.weight.copy_(source.final_norm())
        module.norm.weight.copy_(source.final_norm())
        module.layer.load_state_dict(dict(source.layer(-1)))
        module.join.weight.mul_(0.1)
        module.join.weight[:, size:] += torch.eye(size)

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        module, attention = self.module, AnchoredAttention(self.module.layer)

        def step(k: int, embeddings: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            normed = module.embedding_norm(embeddings), module.hidden_norm(state)
            x = attention.step(module.join(torch.cat(normed, -1)), k - 1)
            read = module.norm(x)
            return read, read

        state_BLE = module.first_state(batch.taps[module.taps[0]])
        return unrolled(batch, depth, module.output, state_BLE, step)


TRAINING = MtpTraining
