"""One decoder layer that reads the target's hidden states, and drafts step by step.

An entry of the layer stands for a token whose hidden states are known together with the token
that follows it. Its input joins both: normed outputs of several of the target's layers (low,
middle and high, as in EAGLE-3, arXiv 2503.01840) and the embedding of the following token. Behind
the anchor the target's states are not known; the layer's own output takes their place, and
training does just that (training-time test).

Shape legend: B texts, L tokens, E hidden size, R output rows, H query heads, G key-value heads,
D head size, S draft steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from foredraft.drafters.heads.base import (
    TAPS,
    HeadModule,
)
from foredraft.drafters.heads.layers import (
    Joined,
    JoinedTokens,
    LlamaLayer,
    RMSNorm,
    head_weights,
)
from foredraft.drafters.heads.steps import StepRunner, stepwise_drafter
from foredraft.models.base import HeadTarget, ModelShape


class HiddenHeadModule(HeadModule):
    """See the module docstring."""

    kind = "hidden_head"
    training_file = "foredraft.train.heads.hidden_head"
    OPTIONS: ClassVar = {"taps": TAPS}

    def __init__(self, shape: ModelShape, num_rows: int | None, taps: Sequence[int]) -> None:
        super().__init__(shape, taps, num_rows=num_rows, taps=[*taps])
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.tap_norms = nn.ModuleList(RMSNorm(hidden, eps) for _ in taps)
        self.own_norm, self.embedding_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.join_taps = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.join_own = nn.Linear(hidden, hidden, bias=False)
        self.join_embedding = nn.Linear(hidden, hidden, bias=False)
        self.layer = LlamaLayer(shape)
        self.norm = RMSNorm(hidden, eps)

    @staticmethod
    def new_output(num_rows: int, hidden_size: int) -> nn.Linear:
        return nn.Linear(hidden_size, num_rows, bias=False)

    @property
    def rows(self) -> Tensor:
        rows: Tensor = self.output.weight
        return rows

    def runner(self, target: HeadTarget) -> StepRunner:
        eps = self.shape.rms_norm_eps
        token = self.join_embedding.weight * self.embedding_norm.weight
        tokens = JoinedTokens(target, token, eps)
        norms = [norm.get_parameter("weight") for norm in self.tap_norms]
        join_taps = Joined(target, norms, self.join_taps.weight, eps, tokens)
        join_own = Joined(target, [self.own_norm.weight], self.join_own.weight, eps, tokens)
        weights = head_weights([self.layer], self.norm, self.rows, self.shape)
        return StepRunner(target.head_runner(weights), join_taps, join_own.of_one)


DRAFTER = stepwise_drafter(
    HiddenHeadModule,
    summary="a trained layer on the target's hidden states drafts a tree, token by token",
    num_draft_tokens=16,
)
