"""Drafting with a `DraftModelModule`: a draft model made of the target's embedding and few layers.

It keeps its entries beside the target's own, so it needs no cache that would have to catch up.

Shape legend: T tokens, E hidden size, N scored nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from foredraft.drafters.common.llama_layer import LlamaLayer
from foredraft.drafters.common.steps import ModuleDrafter
from foredraft.drafters.draft_model.module import DraftModelModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights


class DistilledRunner:
    """See `foredraft.drafters.common.steps.StepRunner`.

    Args:
        module: a trained draft model.
        target: its target.
    """

    def __init__(self, module: DraftModelModule, target: HeadTarget) -> None:
        self._parts = target.parts
        self._runner = target.head_runner(
            HeadWeights(
                [cast(LlamaLayer, layer).weights() for layer in module.layers],
                module.norm.weight.detach(),
                module.output.detach(),
                module.shape,
            )
        )
        self.layers = self._runner.layers

    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        return self._parts.embed(torch.tensor(following))

    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        return self._parts.embed(torch.tensor(tokens))

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


class DistilledDrafter(ModuleDrafter):
    """A `DraftModelModule` drafts trees."""

    runner = DistilledRunner
