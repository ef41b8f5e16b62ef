"""Drafting with an `EagleModule`: its weights where the target runs them.

Shape legend: T tokens, E hidden size, N scored nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.drafters.common.joining import Joined, JoinedTokens
from foredraft.drafters.common.steps import ModuleDrafter
from foredraft.drafters.eagle.module import EagleModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights


class EagleRunner:
    """The module's weights where the target runs them.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: EagleModule, target: HeadTarget) -> None:
        eps = module.shape.rms_norm_eps
        self._runner = target.head_runner(
            HeadWeights(
                [module.layer.weights()],
                module.norm.weight.detach(),
                module.output.weight.detach(),
                module.shape,
            )
        )
        self.layers = self._runner.layers

        tokens = JoinedTokens(
            target.parts,
            module.join_embedding.weight * module.embedding_norm.weight,
            eps,
            target.vocab_size,
        )
        norms = [module.get_parameter(f"tap_norms.{i}.weight") for i in range(len(module.taps))]
        self._join_taps = Joined(target, norms, module.join_taps.weight, eps, tokens)
        own_norms = [module.own_norm.weight]
        self._join_own = Joined(target, own_norms, module.join_own.weight, eps, tokens)

    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """Layer inputs [T, E] for tokens that the target has read, and those that follow them."""
        return self._join_taps(taps, following)

    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        """Layer inputs [N, E] for drafted tokens, ``states_NE`` of what each was drafted from."""
        return self._join_own([states_NE], tokens)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


class EagleDrafter(ModuleDrafter):
    """An `EagleModule` drafts trees."""

    runner = EagleRunner
