"""Drafting with an `MtpModule`: its weights where the target runs them.

Shape legend: T tokens, E hidden size, N scored nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.common.growing import GrowthLimits
from foredraft.drafters.common.joining import Join
from foredraft.drafters.common.steps import StepDrafter
from foredraft.drafters.mtp.module import MtpModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights


class MtpRunner:
    """See `foredraft.drafters.common.steps.StepRunner`.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: MtpModule, target: HeadTarget) -> None:
        self._parts, eps = target.parts, module.shape.rms_norm_eps
        self._module = module.to(self._parts.device).eval()
        norms = [module.embedding_norm.weight, module.hidden_norm.weight]
        self._join = Join(target, norms, module.join.weight, eps)
        self._runner = target.head_runner(
            HeadWeights(
                [module.layer.weights()],
                module.norm.weight.detach(),
                module.output.detach(),
                module.shape,
            )
        )
        self.layers = self._runner.layers

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        return self._inputs(following, self._module.first_state(taps[0]))

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        state_NE = self._module.next_state(states_NE, self._module.norm(states_NE))
        return self._inputs(tokens, state_NE)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)

    def _inputs(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        return self._join(self._parts.embed(torch.tensor(tokens)), states)


class MtpDrafter(StepDrafter):
    """An `MtpModule` drafts trees, its one layer used again for each depth.

    Args:
        module: a trained head.
        target: its target.
        limits: how far a tree may grow.
    """

    def __init__(
        self, module: MtpModule, target: HeadTarget, limits: GrowthLimits | None = None
    ) -> None:
        runner = MtpRunner(module, target)
        super().__init__(runner, target, module.taps, module.output_ids_R, limits)
