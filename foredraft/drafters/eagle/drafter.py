"""Drafting with an `EagleModule`: its weights where the target runs them.

Shape legend: T tokens, E hidden size, C joined parts, N scored nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.common.growing import GrowthLimits
from foredraft.drafters.common.steps import StepDrafter
from foredraft.drafters.eagle.module import EagleModule
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights, TargetParts

_TABLE_BYTES = 128e6


class JoinedTokens:
    """What tokens add to a layer's input: their normed embeddings times a matrix.

    Args:
        parts: of the target, for its embeddings.
        weight_EE: the matrix.
        eps: of the norm.
        vocab_size: V.

    Attributes:
        table_VE: it depends on nothing else, so for vocabularies that are not too large it is kept
            for all of them, in bfloat16.
    """

    def __init__(self, parts: TargetParts, weight_EE: Tensor, eps: float, vocab_size: int) -> None:
        self._parts, self._eps = parts, eps
        self._weight_EE = weight_EE.detach().to(parts.device, parts.dtype)
        self.table_VE: Tensor | None = None
        if 2 * vocab_size * len(weight_EE) <= _TABLE_BYTES:
            firsts = range(0, vocab_size, 4096)
            ids = [torch.arange(first, min(first + 4096, vocab_size)) for first in firsts]
            self.table_VE = torch.cat([self._of(ids_T).bfloat16() for ids_T in ids])

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Float32 [T, E]."""
        return self._of(torch.tensor(tokens)).float()

    @torch.no_grad()
    def _of(self, ids_T: Tensor) -> Tensor:
        x_TE = self._parts.embed(ids_T).float()
        normed_TE = F.rms_norm(x_TE, x_TE.shape[-1:], eps=self._eps)
        return F.linear(normed_TE.to(self._weight_EE.dtype), self._weight_EE)


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

        # A norm's weights scale the columns of the matrix behind it: one product less to make.
        norms: list[Tensor] = [
            module.get_parameter(f"tap_norms.{i}.weight") for i in range(len(module.taps))
        ]
        self._joined = JoinedTokens(
            target.parts,
            module.join_embedding.weight * module.embedding_norm.weight,
            eps,
            target.vocab_size,
        )
        table_VE = self._joined.table_VE
        join_taps, join_own = module.join_taps.weight, module.join_own.weight
        self._join_taps = target.join(join_taps * torch.cat(norms), table_VE, eps)
        self._join_own = target.join(join_own * module.own_norm.weight, table_VE, eps)

    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """Layer inputs [T, E] for tokens that the target has read, and those that follow them."""
        return self._with_tokens(self._join_taps(taps, following), following)

    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        """Layer inputs [N, E] for drafted tokens, ``states_NE`` of what each was drafted from."""
        return self._with_tokens(self._join_own([states_NE], tokens), tokens)

    def _with_tokens(self, joined_TE: Tensor, tokens: Sequence[int]) -> Tensor:
        if self._joined.table_VE is not None:  # they are in it
            return joined_TE
        return joined_TE + self._joined(tokens)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


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
