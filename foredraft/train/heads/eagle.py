"""How an `EagleModule` learns: training-time test (arXiv 2503.01840).

Shape legend: B texts, L tokens, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.drafters.heads.eagle import EagleModule
from foredraft.train.heads.base import (
    AnchoredAttention,
    HeadTraining,
    Prediction,
    TextBatch,
    unrolled,
)
from foredraft.train.target import TrainingTarget


class EagleTraining(HeadTraining[EagleModule]):
    """See the module docstring."""

    def take_layers(self, source: TrainingTarget) -> None:
        module, size = self.module, source.shape.hidden_size
        last = dict(source.layer(-1))
        module.norm.weight.fill_(1.0 / float(module.output.norm(dim=1).mean()))
        module.join_taps.weight.mul_(0.1)
        module.join_taps.weight[:, -size:] += torch.eye(size)
        module.layer.qkv.weight.mul_(0.1)
        module.layer.qkv.weight[:, size:] = last.pop("qkv.weight")
        module.layer.load_state_dict(last, strict=False)

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        module, attention = self.module, AnchoredAttention(self.module.layer)

        def step(k: int, embeddings: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            x = attention.step(torch.cat((embeddings, state), -1), k - 1)
            normed = module.norm(x)
            return normed, module.next_state(x, normed)

        state_BLE = module.fused([batch.taps[layer] for layer in module.taps])
        return unrolled(batch, depth, module.output, state_BLE, step)


TRAINING = EagleTraining
