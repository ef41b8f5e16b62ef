"""How a `MedusaModule` learns."""

from __future__ import annotations

from torch import nn

from foredraft.drafters.heads.medusa import MedusaModule
from foredraft.train.heads.base import HeadTraining, Prediction, TextBatch
from foredraft.train.target import TrainingTarget


class MedusaTraining(HeadTraining[MedusaModule]):
    """See the module docstring."""

    def take_layers(self, source: TrainingTarget) -> None:
        self.module.output_norm.weight.copy_(source.final_norm())
        for head in self.module.heads:  # each is the identity
            for parameter in head.get_submodule("block").parameters():
                parameter.zero_()
            nn.init.eye_(head.get_parameter("projection.weight"))

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        module = self.module
        states_BLHE = module.output_norm(module.projected(batch.taps[module.taps[0]], depth))
        return [
            Prediction(states_BLE, module.output, k)
            for k, states_BLE in enumerate(states_BLHE.unbind(-2), 1)
        ]


TRAINING = MedusaTraining
