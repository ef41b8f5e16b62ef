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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.drafters.heads.base import (
    HeadModule,
)
from foredraft.drafters.heads.layers import Joined, JoinedTokens, RMSNorm, head_weights
from foredraft.drafters.heads.steps import StepRunner, stepwise_drafter
from foredraft.models.base import HeadTarget, ModelShape


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
    """See the module docstring."""

    kind = "hydra"
    training_file = "foredraft.train.heads.hydra"

    def __init__(self, shape: ModelShape, num_rows: int | None) -> None:
        super().__init__(shape, (shape.num_hidden_layers - 1,), num_rows=num_rows)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.hidden_norm, self.own_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.token_norm = RMSNorm(hidden, eps)
        self.join_hidden = nn.Linear(2 * hidden, hidden, bias=False)
        self.join_own = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = FeedForward(hidden, shape.intermediate_size, eps)
        self.norm = RMSNorm(hidden, eps)

    def runner(self, target: HeadTarget) -> StepRunner:
        shape, parts = self.shape, target.parts
        eps, token_norm = shape.rms_norm_eps, self.token_norm.weight
        norms = [self.hidden_norm.weight, token_norm]
        join_hidden = Joined(target, norms, self.join_hidden.weight, eps)
        state, token = self.join_own.weight.chunk(2, 1)
        tokens = JoinedTokens(target, token * token_norm, eps)
        join_own = Joined(target, [self.own_norm.weight], state, eps, tokens)

        def of_text(taps: Sequence[Tensor], following: Sequence[int]) -> Tensor:
            return join_hidden([taps[0], parts.embed(torch.tensor(following))], following)

        weights = head_weights([self.layer], self.norm, self.output, shape)
        return StepRunner(target.head_runner(weights), of_text, join_own.of_one, attends=False)


DRAFTER = stepwise_drafter(
    HydraModule,
    summary="a trained head without attention drafts step by step from the last hidden state",
    num_draft_tokens=8,
)
