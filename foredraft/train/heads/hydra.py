"""How a `HydraModule` learns."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.drafters.heads.hydra import HydraModule
from foredraft.train.heads.base import HeadTraining, Prediction, TextBatch, unrolled
from foredraft.train.target import TrainingTarget


class HydraTraining(HeadTraining[HydraModule]):
    """See the module docstring."""

    def take_layers(self, source: TrainingTarget) -> None:
        module, size = self.module, source.shape.hidden_size
        module.norm.weight.copy_(source.final_norm())
        for join in (module.join_hidden, module.join_own):
            join.weight.mul_(0.1)
            join.weight[:, :size] += torch.eye(size)
        last = source.layer(-1)
        module.layer.load_state_dict({name: last[name] for name in module.layer.weights()})

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        module, dtype = self.module, self.module.output.dtype

        def step(k: int, embeddings: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            # The first state is the target's, later ones are the layer's own output.
            norm, join = (
                (module.hidden_norm, module.join_hidden)
                if k == 1
                else (module.own_norm, module.join_own)
            )
            token = module.token_norm(embeddings.to(dtype))
            x = module.layer(join(torch.cat((norm(state.to(dtype)), token), -1)))
            return module.norm(x), x

        return unrolled(batch, depth, module.output, batch.taps[module.taps[0]], step)


TRAINING = HydraTraining
