"""Drafting with an `Eagle3Module`: its weights where the target runs them.

Shape legend: T tokens, E hidden size, P tapped layers, Q columns of queries, keys and values,
N scored nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.common.joining import Joined, JoinedTokens
from foredraft.drafters.common.steps import ModuleDrafter
from foredraft.drafters.eagle3.module import Eagle3Module
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights


class Eagle3Runner:
    """See `foredraft.drafters.common.steps.StepRunner`.

    Queries, keys and values are made by the target's joins, and handed in.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: Eagle3Module, target: HeadTarget) -> None:
        self._module, self._eps = module.to(target.parts.device).eval(), module.shape.rms_norm_eps
        layer = module.layer
        token, state = layer.qkv.weight.chunk(2, 1)
        token = token * layer.token_norm.weight
        tokens = JoinedTokens(target.parts, token, self._eps, target.vocab_size)
        state_norm = layer.get_parameter("attention_norm.weight")
        self._join = Joined(target, [state_norm], state, self._eps, tokens)
        self._fuse = _Fusion(module, target)
        self._runner = target.head_runner(
            HeadWeights(
                [layer.weights()], module.norm.weight.detach(), module.output.detach(), module.shape
            )
        )
        self.layers = self._runner.layers

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        return self._inputs(self._fuse(taps), following)

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        state_NE = self._module.next_state(states_NE, self._module.norm(states_NE))
        return self._inputs(state_NE, tokens)

    def _inputs(self, states_TE: Tensor, tokens: Sequence[int]) -> Tensor:
        """What the layer adds to beside queries, keys and values; [T, E + Q]."""
        added_to_TE = self._module.layer.added_to(states_TE)
        return torch.cat((added_to_TE, self._join([states_TE], tokens)), 1)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


class _Fusion:
    """`Eagle3Module.fused` by the target's joins."""

    def __init__(self, module: Eagle3Module, target: HeadTarget) -> None:
        self._eps, weight = module.shape.rms_norm_eps, module.join_taps.weight
        count = len(module.tap_norms)
        norms = [module.get_parameter(f"tap_norms.{i}.weight") for i in range(count)]
        self._is_normed, self._joins_first = bool(norms), count != len(module.taps)
        no_norm = weight.new_ones(weight.shape[1])
        self._join = Joined(target, norms or [no_norm], weight, self._eps)

    def __call__(self, taps: Sequence[Tensor]) -> Tensor:
        """Float32 [T, E]."""
        if not self._joins_first:
            return self._join(taps)
        x_TK = torch.cat([tap.float() for tap in taps], -1)
        joined_TE = self._join([x_TK])
        if self._is_normed:
            return joined_TE
        # Joins bring what they join to a mean square of 1, and here there is to be no norm.
        return joined_TE * (x_TK.square().mean(-1, keepdim=True) + self._eps).sqrt()


class Eagle3Drafter(ModuleDrafter):
    """An `Eagle3Module` drafts trees."""

    runner = Eagle3Runner
