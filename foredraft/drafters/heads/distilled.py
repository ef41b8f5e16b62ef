"""A draft model distilled from its target: the target's embedding, few layers, few output rows.

The layers start as the target's first and last ones, and learn to replace those between. The
embedding stays the target's own, so that it is neither trained nor stored. It reads each token one
entry early, beside the one before it as all heads do, so a text's very first token is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.base import CausalHead, HeadOption, HeadSource, following
from foredraft.drafters.heads.layers import head_weights
from foredraft.drafters.heads.steps import StepRunner
from foredraft.models.base import HeadTarget, ModelShape


class DraftModelModule(CausalHead):
    """See the module docstring."""

    kind = "draft_model"
    shift = 2

    OPTIONS: ClassVar = {"num_layers": HeadOption("layers of the draft model (2)", 2)}

    def __init__(self, shape: ModelShape, num_rows: int | None, num_layers: int) -> None:
        if num_layers > shape.num_hidden_layers:
            raise ConfigError(
                f"num_layers is {num_layers}; the target itself has {shape.num_hidden_layers}"
            )
        super().__init__(shape, (), num_layers, num_rows=num_rows)

    def take_layers(self, source: HeadSource) -> None:
        num_last = self.num_layers // 2
        self.take_from(source, [*range(self.num_layers - num_last), *range(-num_last, 0)])

    def inputs(self, embeddings: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return following(embeddings, 1).to(self.output.dtype)

    def runner(self, target: HeadTarget) -> DistilledRunner:
        return DistilledRunner(self, target)


class DistilledRunner(StepRunner):
    """Makes the inputs of a `DraftModelModule`'s layers: embeddings alone."""

    def __init__(self, module: DraftModelModule, target: HeadTarget) -> None:
        weights = head_weights(module.layers, module.norm, module.output, module.shape)
        super().__init__(target, weights)
        self._parts = target.parts

    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        return self._parts.embed(torch.tensor(following))

    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        return self._parts.embed(torch.tensor(tokens))
