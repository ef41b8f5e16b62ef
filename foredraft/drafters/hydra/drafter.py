"""Drafting with a `HydraModule`: its weights where the target runs them.

Shape legend: T tokens, E hidden size, N scored nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.drafters.common.joining import Joined, JoinedTokens
from foredraft.drafters.common.steps import ModuleDrafter
from foredraft.drafters.hydra.module import HydraModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights


class HydraRunner:
    """See `foredraft.drafters.common.steps.StepRunner`.

    Args:
        module: a trained head.
        target: its target.
    """

    layers = None

    def __init__(self, module: HydraModule, target: HeadTarget) -> None:
        self._parts, eps = target.parts, module.shape.rms_norm_eps
        token_norm = module.token_norm.weight
        norms = [module.hidden_norm.weight, token_norm]
        self._join_hidden = Joined(target, norms, module.join_hidden.weight, eps)
        state, token = module.join_own.weight.chunk(2, 1)
        tokens = JoinedTokens(target.parts, token * token_norm, eps, target.vocab_size)
        self._join_own = Joined(target, [module.own_norm.weight], state, eps, tokens)
        self._runner = target.head_runner(
            HeadWeights(
                [module.layer.weights()],
                module.norm.weight.detach(),
                module.output.detach(),
                replace(module.shape, intermediate_size=module.width),
            )
        )

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        embedded_TE = self._parts.embed(torch.tensor(following))
        return self._join_hidden([taps[0], embedded_TE], following)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        return self._join_own([states_NE], tokens)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        # Nothing attends, so it does not matter where the tokens stand.
        alone = [HeadRow(row.slot, 0, row.num_wanted, num_wanted=row.num_wanted) for row in rows]
        return self._runner.run(alone, inputs_TE)


class HydraDrafter(ModuleDrafter):
    """A `HydraModule` drafts trees."""

    runner = HydraRunner
