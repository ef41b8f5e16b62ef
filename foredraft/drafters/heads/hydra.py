"""Hydra's heads: like Medusa's, but each also knows the tokens drafted before its own.

Z. Ankner et al., arXiv 2402.05109. A recurrent state, which goes from one token to the next, holds
those tokens, as in the speculators of D. Wertheimer et al., arXiv 2404.19124. State and embedding
of the token after it are joined by a linear path; a gated feed-forward layer runs in parallel. The
first state is the target's last hidden state. There is no attention and no cache: the layer is an
EAGLE layer without its attention.

Shape legend: E hidden size, F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.drafters.heads.base import (
    LARGEST_SIZE,
    HeadModule,
    HeadOption,
)
from foredraft.drafters.heads.layers import Joined, JoinedTokens, RMSNorm, head_weights
from foredraft.drafters.heads.steps import StepRunner, stepwise_drafter
from foredraft.models.base import HeadRow, HeadTarget, ModelShape


class FeedForward(nn.Module):
    """The half of a `LlamaLayer` that does not attend."""

    def __init__(self, hidden_size: int, width: int, eps: float) -> None:
        super().__init__()
        self.mlp_norm = RMSNorm(hidden_size, eps)
        self.gate_up = nn.Linear(hidden_size, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)

    def weights(self) -> dict[str, Tensor]:
        """Its tensors by name, as `foredraft.models.base.HeadWeights` wants them."""
        return {name: tensor.detach() for name, tensor in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        product: Tensor = self.down(F.silu(gate) * up)
        return x + product


class HydraModule(HeadModule):
    """See the module docstring.

    Args:
        width: F; the target's own when 0.
    """

    kind = "hydra"
    training_file = "foredraft.train.heads.hydra"
    OPTIONS: ClassVar = {
        "width": HeadOption(
            "of the feed-forward layer (the target's own)", 0, least=0, most=LARGEST_SIZE
        )
    }

    def __init__(self, shape: ModelShape, num_rows: int | None, width: int) -> None:
        self.width = width or shape.intermediate_size
        last = shape.num_hidden_layers - 1
        super().__init__(shape, (last,), num_rows=num_rows, width=self.width)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.hidden_norm, self.own_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.token_norm = RMSNorm(hidden, eps)
        self.join_hidden = nn.Linear(2 * hidden, hidden, bias=False)
        self.join_own = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = FeedForward(hidden, self.width, eps)
        self.norm = RMSNorm(hidden, eps)

    def runner(self, target: HeadTarget) -> HydraRunner:
        return HydraRunner(self, target)


class HydraRunner(StepRunner):
    """Makes the inputs of a `HydraModule`'s layer, which the target runs."""

    def __init__(self, module: HydraModule, target: HeadTarget) -> None:
        shape = replace(module.shape, intermediate_size=module.width)
        super().__init__(target, head_weights([module.layer], module.norm, module.output, shape))
        self.layers = ()
        self._parts, eps = target.parts, shape.rms_norm_eps
        token_norm = module.token_norm.weight
        norms = [module.hidden_norm.weight, token_norm]
        self._join_hidden = Joined(target, norms, module.join_hidden.weight, eps)
        state, token = module.join_own.weight.chunk(2, 1)
        tokens = JoinedTokens(target, token * token_norm, eps)
        self._join_own = Joined(target, [module.own_norm.weight], state, eps, tokens)

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
        return super().run(alone, inputs_TE)


DRAFTER = stepwise_drafter(
    HydraModule,
    summary="a trained head without attention drafts step by step from the last hidden state",
    num_draft_tokens=8,
)
