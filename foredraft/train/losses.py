"""What a head is trained to do: losses of its logits against the target's distribution.

A loss takes what is known of some positions (`Positions`) and returns its value at each, with its
gradient by the logits in closed form: logits are many, so they are made, used and dropped piece by
piece (`product_loss`). With p the target's probability at temperature 1, q the head's and
alpha = sum(min(p, q)) their overlap:

=========  =====================================================================================
soft       cross-entropy, -sum(p log q)
hard       -log q of the text's own token
nla        -log alpha: the chance that rejection sampling accepts (LK losses, Nebius)
tv         1 - alpha
lk         w soft + (1 - w) tv with w = exp(-3 alpha): first the one, then the other (likewise)
=========  =====================================================================================

A target's mass on tokens that the head cannot name is lost to it. ``renormalise`` instead trains it
on the target's distribution over those that it can.

Shape legend: N positions, R output rows, K columns of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from foredraft.core.errors import unknown

_LK_RATE = 3.0
_SMALLEST = 1e-6
"""Overlap below which -log overlap is flat: a head that knows nothing yet must not diverge."""
_CPU_ELEMENTS = 1 << 19
"""Logits of one piece: what is made of them fits the cores' caches."""
_GPU_ELEMENTS = 1 << 26
_PRODUCT_ELEMENTS = 1 << 26
"""Logits of one product, kept until their gradient has taken their place."""


@dataclass(frozen=True)
class Positions:
    """Some positions, as losses see them.

    Attributes:
        logits_NR: float32, of the head.
        draft_probs_NR: softmax of these.
        normaliser_N: log of the sum of their exponentials.
        target_probs_NR: float32, of the target at temperature 1; rows may sum up to less than 1.
        labels_N: row of the text's own token; -1: it has none.
        overlap_N: sum of the smaller of the two probabilities.
    """

    logits_NR: Tensor
    draft_probs_NR: Tensor
    normaliser_N: Tensor
    target_probs_NR: Tensor
    labels_N: Tensor
    overlap_N: Tensor


ValueAndGradient = tuple[Tensor, Tensor]
Loss = Callable[[Positions], ValueAndGradient]
"""Value [N], and its gradient [N, R] by the logits."""


def soft_loss(x: Positions) -> ValueAndGradient:
    """Cross-entropy with the target's distribution."""
    mass_N = x.target_probs_NR.sum(-1)
    value_N = mass_N * x.normaliser_N - (x.target_probs_NR * x.logits_NR).sum(-1)
    return value_N, mass_N[:, None] * x.draft_probs_NR - x.target_probs_NR


def hard_loss(x: Positions) -> ValueAndGradient:
    """Cross-entropy with the text itself; nothing where the head cannot name its token."""
    has_N, rows_N1 = (x.labels_N >= 0).float(), x.labels_N.clamp(min=0)[:, None]
    value_N = (x.normaliser_N - x.logits_NR.gather(1, rows_N1)[:, 0]) * has_N
    gradient_NR = x.draft_probs_NR * has_N[:, None]
    return value_N, gradient_NR.scatter_add(1, rows_N1, -has_N[:, None])


def tv_loss(x: Positions) -> ValueAndGradient:
    """Total variation, 1 - overlap."""
    return 1.0 - x.overlap_N, _tv_gradient(x)


def _tv_gradient(x: Positions) -> Tensor:
    lower_NR = x.draft_probs_NR * (x.draft_probs_NR < x.target_probs_NR)
    return x.draft_probs_NR * lower_NR.sum(-1, keepdim=True) - lower_NR


def nla_loss(x: Positions) -> ValueAndGradient:
    """Minus log of the overlap."""
    overlap_N = x.overlap_N.clamp(min=_SMALLEST)
    return -overlap_N.log(), _tv_gradient(x) / overlap_N[:, None]


def lk_loss(x: Positions) -> ValueAndGradient:
    """Cross-entropy while the overlap is small, total variation once it is not."""
    weight_N = torch.exp(-_LK_RATE * x.overlap_N)
    (soft_N, soft_NR), (tv_N, tv_NR) = soft_loss(x), tv_loss(x)
    value_N = weight_N * soft_N + (1 - weight_N) * tv_N
    return value_N, weight_N[:, None] * soft_NR + (1 - weight_N[:, None]) * tv_NR


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {"soft": soft_loss, "hard": hard_loss, "nla": nla_loss, "tv": tv_loss, "lk": lk_loss}
)


def loss_named(name: str) -> Loss:
    """The loss of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return LOSSES[name]


def positions_of(logits_NR: Tensor, target_probs_NR: Tensor, labels_N: Tensor) -> Positions:
    """What losses see, from float32 logits."""
    highest_N1 = logits_NR.amax(-1, keepdim=True)
    draft_probs_NR = (logits_NR - highest_N1).exp_()
    total_N1 = draft_probs_NR.sum(-1, keepdim=True)
    draft_probs_NR /= total_N1
    return Positions(
        logits_NR,
        draft_probs_NR,
        (highest_N1 + total_N1.log())[:, 0],
        target_probs_NR,
        labels_N,
        torch.minimum(draft_probs_NR, target_probs_NR).sum(-1),
    )


@dataclass(frozen=True)
class Goal:
    """What the target says at some positions.

    Attributes:
        probs_TR: the target's probabilities over the output rows at some positions.
        rows_N: which of these belongs to each position of the product.
        labels_N: row of the text's own token; -1: it has none.
        weights_N: of the positions, in the sum.
    """

    probs_TR: Tensor
    rows_N: Tensor
    labels_N: Tensor
    weights_N: Tensor


def product_loss(
    states_NK: Tensor, output_RK: Tensor, goal: Goal, loss: Loss
) -> tuple[Tensor, Tensor]:
    """The weighted sum of a loss over positions, for logits that are a product.

    The product is made in the dtype of ``states_NK``, everything after it in float32.

    Returns:
        The sum, and the overlap [N] at each position (without gradient).
    """
    summed, overlap_N = _ProductLoss.apply(states_NK, output_RK, goal, loss)  # type: ignore[no-untyped-call]
    return summed, overlap_N


class _ProductLoss(torch.autograd.Function):
    """Makes the gradient with the value: logits are made once."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, states_NK: Tensor, output_RK: Tensor, goal: Goal, loss: Loss
    ) -> tuple[Tensor, Tensor]:
        output = output_RK.to(states_NK.dtype)
        step = max(1, _PRODUCT_ELEMENTS // len(output))
        states_gradient = torch.empty_like(states_NK)
        output_gradient = torch.zeros_like(output_RK)
        summed = torch.zeros((), device=states_NK.device)
        overlap_N = torch.empty(len(states_NK), device=states_NK.device)
        for first in range(0, len(states_NK), step):
            part = slice(first, first + step)
            logits_NR = states_NK[part] @ output.T
            summed += _in_place(logits_NR, goal, part, loss, overlap_N)
            torch.mm(logits_NR, output, out=states_gradient[part])
            output_gradient += logits_NR.T @ states_NK[part]
        ctx.save_for_backward(states_gradient, output_gradient)
        ctx.mark_non_differentiable(overlap_N)  # type: ignore[attr-defined]
        return summed, overlap_N

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, summed: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        states_gradient, output_gradient = ctx.saved_tensors
        return (
            states_gradient * summed.to(states_gradient.dtype),
            output_gradient * summed,
            None,
            None,
        )


def _in_place(logits_NR: Tensor, goal: Goal, part: slice, loss: Loss, overlap_N: Tensor) -> Tensor:
    """Turn logits into the gradient by them; the weighted sum of the loss."""
    limit = _CPU_ELEMENTS if logits_NR.device.type == "cpu" else _GPU_ELEMENTS
    step = max(1, limit // logits_NR.shape[1])
    summed = torch.zeros((), device=logits_NR.device)
    for first in range(0, len(logits_NR), step):
        rows = slice(first, min(first + step, len(logits_NR)))
        there = slice(part.start + rows.start, part.start + rows.stop)
        target_NR = goal.probs_TR[goal.rows_N[there]].float()
        x = positions_of(logits_NR[rows].float(), target_NR, goal.labels_N[there])
        value_N, gradient_NR = loss(x)
        weights_N = goal.weights_N[there]
        summed += (value_N * weights_N).sum()
        logits_NR[rows] = gradient_NR.mul_(weights_N[:, None])
        overlap_N[there] = x.overlap_N
    return summed
