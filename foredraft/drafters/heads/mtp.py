"""Multi-token prediction: a decoder layer carries the target's last state on, token by token.

DeepSeek-V3, arXiv 2412.19437: norms of the state that the target's head reads and of the embedding
of the token after it, a projection of both, a decoder layer and a norm. Behind the anchor its own
output takes the state's place (FastMTP, arXiv 2509.18362), so that one layer drafts as far as
several do.

Models that bring such a layer (Qwen3-Next, Qwen3.5, GLM-4.5, MiMo) draft with it: `OwnMtp`.

Shape legend: T tokens, N drafted tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.layers import (
    Joined,
    JoinedTokens,
    LlamaLayer,
    RMSNorm,
    head_weights,
)
from foredraft.drafters.heads.steps import StepRunner, stepwise_drafter
from foredraft.models.base import HeadTarget, ModelShape


class MtpModule(HeadModule):
    """See the module docstring."""

    kind = "mtp"
    training_file = "foredraft.train.heads.mtp"

    def __init__(self, shape: ModelShape, num_rows: int | None) -> None:
        last = shape.num_hidden_layers - 1
        super().__init__(shape, (last,), num_rows=num_rows)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.target_norm = RMSNorm(hidden, eps)
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = LlamaLayer(shape)
        self.norm = RMSNorm(hidden, eps)

    def first_state(self, hidden: Tensor) -> Tensor:
        """The last layer's output after the target's final norm: input of the LM head; [..., E]."""
        normed: Tensor = self.target_norm(hidden.to(self.output.dtype))
        return normed

    def runner(self, target: HeadTarget) -> StepRunner:
        self.to(target.parts.device).eval()
        token, state = self.join.weight.chunk(2, 1)
        eps = self.shape.rms_norm_eps
        tokens = JoinedTokens(target, token * self.embedding_norm.weight, eps)
        join = Joined(target, [self.hidden_norm.weight], state, eps, tokens)

        def of_text(taps: Sequence[Tensor], following: Sequence[int]) -> Tensor:
            return join([self.first_state(taps[0])], following)

        def of_own(states_NE: Tensor, drafted: Sequence[int]) -> Tensor:
            return join([self.norm(states_NE)], drafted)

        weights = head_weights([self.layer], self.norm, self.output, self.shape)
        return StepRunner(target.head_runner(weights), of_text, of_own)


class OwnMtp:
    """The layer that a model brings; a `foredraft.drafters.heads.steps.StepHead`."""

    output_ids_R: Tensor | None = None
    promise: tuple[float, float] | None = None

    def __init__(self, target: HeadTarget) -> None:
        self.taps: tuple[int, ...] = (target.capabilities.taps[-1],)

    def runner(self, target: HeadTarget) -> StepRunner:
        own, parts = target.own_layers(), target.parts
        tokens = JoinedTokens(target, own.token_EE, own.eps)
        join = Joined(target, [own.state_norm_E], own.state_EE, own.eps, tokens)

        def of_text(taps: Sequence[Tensor], following: Sequence[int]) -> Tensor:
            return join([parts.norm(taps[0].to(parts.dtype))], following)

        def of_own(states_NE: Tensor, drafted: Sequence[int]) -> Tensor:
            normed_NE = F.rms_norm(states_NE.float(), states_NE.shape[-1:], own.norm_E, own.eps)
            return join([normed_NE], drafted)

        return StepRunner(own.runner, of_text, of_own)


DRAFTER = stepwise_drafter(
    MtpModule,
    summary="a trained layer carries the target's last state on, token by token",
    num_draft_tokens=8,
    own=OwnMtp,
)
