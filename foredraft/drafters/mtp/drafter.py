"""Drafting with an `MtpModule`: its weights where the target runs them.

Shape legend: T tokens, E hidden size, N scored nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.common.joining import Joined, JoinedTokens
from foredraft.drafters.common.steps import ModuleDrafter
from foredraft.drafters.mtp.module import MtpModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights


class MtpRunner:
    """See `foredraft.drafters.common.steps.StepRunner`.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: MtpModule, target: HeadTarget) -> None:
        self._module, eps = module.to(target.parts.device).eval(), module.shape.rms_norm_eps
        token, state = module.join.weight.chunk(2, 1)
        token = token * module.embedding_norm.weight
        tokens = JoinedTokens(target.parts, token, eps, target.vocab_size)
        self._join = Joined(target, [module.hidden_norm.weight], state, eps, tokens)
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
        return self._join([self._module.first_state(taps[0])], following)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        state_NE = self._module.next_state(states_NE, self._module.norm(states_NE))
        return self._join([state_NE], tokens)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


class MtpDrafter(ModuleDrafter):
    """An `MtpModule` drafts trees, its one layer used again for each depth."""

    runner = MtpRunner
