"""Drafting with an `EagleModule`: its weights where the target runs them.

Shape legend: T tokens, E hidden size, C joined parts, N scored nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.common.growing import GrowthLimits
from foredraft.drafters.common.steps import StepDrafter
from foredraft.drafters.eagle.module import EagleModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights, Product, TargetParts


class EagleRunner:
    """The module's weights where the target runs them.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: EagleModule, target: HeadTarget) -> None:
        parts: TargetParts = target.parts
        self._parts, self._eps = parts, module.shape.rms_norm_eps
        self._taps = module.taps
        self._runner = target.head_runner(
            HeadWeights(
                [module.layer.weights()],
                module.norm.weight.detach(),
                module.output.weight.detach(),
                module.shape,
            )
        )
        self.layers = self._runner.layers

        def placed(tensor: Tensor) -> Tensor:
            return tensor.detach().to(parts.device, parts.dtype)

        embedding = module.join_embedding.weight
        self._join_taps = target.product(torch.cat((module.join_taps.weight, embedding), 1))
        self._join_own = target.product(torch.cat((module.join_own.weight, embedding), 1))
        norms = [module.get_parameter(f"tap_norms.{i}.weight") for i in range(len(module.taps))]
        self._tap_norms = placed(torch.stack([*norms, module.embedding_norm.weight]))
        self._own_norms = placed(
            torch.stack([module.own_norm.weight, module.embedding_norm.weight])
        )

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """Layer inputs [T, E] for tokens that the target has read, and those that follow them."""
        return self._join(self._tap_norms, self._join_taps, following, taps)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        """Layer inputs [N, E] for drafted tokens, ``states_NE`` of what each was drafted from."""
        return self._join(self._own_norms, self._join_own, tokens, [states_NE])

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)

    def _join(
        self, norms: Tensor, product: Product, tokens: Sequence[int], states: Sequence[Tensor]
    ) -> Tensor:
        embedded = self._parts.embed(torch.tensor(tokens))
        x_TCE = torch.stack([*(s.to(embedded.dtype) for s in states), embedded], 1).float()
        scale = torch.rsqrt(x_TCE.square().mean(-1, keepdim=True) + self._eps)
        normed = (x_TCE * scale).to(norms.dtype) * norms
        return product(normed.flatten(1))


class EagleDrafter(StepDrafter):
    """An `EagleModule` drafts trees.

    Args:
        module: a trained head.
        target: its target.
        limits: how far a tree may grow.
    """

    def __init__(
        self, module: EagleModule, target: HeadTarget, limits: GrowthLimits | None = None
    ) -> None:
        runner = EagleRunner(module, target)
        super().__init__(runner, target, module.taps, module.output_ids_R, limits)
