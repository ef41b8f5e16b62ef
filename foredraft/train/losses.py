"""Losses of a head's logits against the target's distribution.

A loss takes the figures of some positions (`Positions`) and returns its value at each, with its
gradient by the logits in closed form: logits are many, so they are made, used and dropped piece by
piece (`product_loss`). With p the target's probability at temperature 1, q the head's and
alpha = sum(min(p, q)) their overlap:

=========  =====================================================================================
soft       cross-entropy, -sum(p log q)
hard       -log q of the text's own token
nla        -log alpha: the chance that rejection sampling accepts (LK losses, Nebius)
tv         1 - alpha
lk         w soft + (1 - w) tv with w = exp(-3 alpha): first soft, then tv (LK losses)
=========  =====================================================================================

A target's mass on tokens that the head cannot name is lost to it.

The target's distribution is given by its likeliest tokens among the output rows; there are few that
matter, and nothing is lost by leaving out the others but their share of the mass.

Shape legend: N positions, T positions in replies, R output rows, C candidates (rows that the target
finds likely), K columns of the product.
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
_SMALLEST = 1e-3
"""Overlap below which the slope of -log overlap is constant, so that an untrained head does not
diverge."""
_CPU_ELEMENTS = 1 << 19
"""Logits of one piece: what is made of them fits the cores' caches."""
_GPU_ELEMENTS = 1 << 26
_PRODUCT_ELEMENTS = 1 << 26
"""Logits of one product, kept until their gradient has taken their place."""


@dataclass(frozen=True)
class Positions:
    """Some positions, as losses see them.

    Attributes:
        logits_NC: float32, of the head, for the candidates.
        normaliser_N: log of the sum of exponentials of all its logits.
        draft_probs_NC: its probabilities.
        target_probs_NC: the target's, at temperature 1; they may sum up to less than 1.
        label_logits_N: the head's logit of the text's own token.
        has_label_N: whether the head can name that, 0 or 1.
        overlap_N: sum of the smaller of the two probabilities.
    """

    logits_NC: Tensor
    normaliser_N: Tensor
    draft_probs_NC: Tensor
    target_probs_NC: Tensor
    label_logits_N: Tensor
    has_label_N: Tensor
    overlap_N: Tensor


@dataclass(frozen=True)
class Slope:
    """A loss and its gradient by all logits: ``all_N`` times the head's probabilities, and then
    some more for the candidates and for the text's own token.

    Attributes:
        value_N: of the loss.
        all_N: see above.
        candidates_NC: added for the candidates.
        label_N: added for the text's own token.
    """

    value_N: Tensor
    all_N: Tensor
    candidates_NC: Tensor
    label_N: Tensor


Loss = Callable[[Positions], Slope]


def soft_loss(x: Positions) -> Slope:
    """Cross-entropy with the target's distribution."""
    mass_N = x.target_probs_NC.sum(-1)
    value_N = mass_N * x.normaliser_N - (x.target_probs_NC * x.logits_NC).sum(-1)
    return Slope(value_N, mass_N, -x.target_probs_NC, torch.zeros_like(mass_N))


def hard_loss(x: Positions) -> Slope:
    """Cross-entropy with the text itself; nothing where the head cannot name its token."""
    value_N = (x.normaliser_N - x.label_logits_N) * x.has_label_N
    return Slope(value_N, x.has_label_N, torch.zeros_like(x.logits_NC), -x.has_label_N)


def tv_loss(x: Positions) -> Slope:
    """Total variation, 1 - overlap."""
    lower_NC = x.draft_probs_NC * (x.draft_probs_NC < x.target_probs_NC)
    nothing = torch.zeros_like(x.overlap_N)
    return Slope(1.0 - x.overlap_N, lower_NC.sum(-1), -lower_NC, nothing)


def nla_loss(x: Positions) -> Slope:
    """Minus log of the overlap."""
    tv, overlap_N = tv_loss(x), x.overlap_N.clamp(min=_SMALLEST)
    return Slope(
        -overlap_N.log(), tv.all_N / overlap_N, tv.candidates_NC / overlap_N[:, None], tv.label_N
    )


def lk_loss(x: Positions) -> Slope:
    """Cross-entropy while the overlap is small, total variation once it is not."""
    weight_N, soft, tv = torch.exp(-_LK_RATE * x.overlap_N), soft_loss(x), tv_loss(x)

    def mix(first: Tensor, second: Tensor) -> Tensor:
        weight = weight_N[:, None] if first.ndim == 2 else weight_N
        return weight * first + (1 - weight) * second

    return Slope(
        mix(soft.value_N, tv.value_N),
        mix(soft.all_N, tv.all_N),
        mix(soft.candidates_NC, tv.candidates_NC),
        mix(soft.label_N, tv.label_N),
    )


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


@dataclass(frozen=True)
class Goal:
    """The target's distribution at some positions.

    Attributes:
        candidates_TC: its likeliest output rows, at some positions.
        probs_TC: how likely; float32.
        rows_N: which of the T belongs to each position of the product.
        labels_N: row of the text's own token; -1: it has none.
        weights_N: of the positions, in the sum.
    """

    candidates_TC: Tensor
    probs_TC: Tensor
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
        ctx.mark_non_differentiable(overlap_N)
        return summed, overlap_N

    @staticmethod
    @once_differentiable
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
        places = slice(part.start + rows.start, part.start + rows.stop)
        value_N, gradient_NR, overlap_N[places] = piece_loss(
            logits_NR[rows].float(),
            goal.candidates_TC[goal.rows_N[places]],
            goal.probs_TC[goal.rows_N[places]],
            goal.labels_N[places],
            goal.weights_N[places],
            loss,
        )
        logits_NR[rows] = gradient_NR
        summed += (value_N * goal.weights_N[places]).sum()
    return summed


def piece_loss(
    logits_NR: Tensor,
    candidates_NC: Tensor,
    probs_NC: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    loss: Loss,
) -> tuple[Tensor, Tensor, Tensor]:
    """A loss at some positions; ``logits_NR`` (float32) are overwritten.

    Returns:
        Its value [N], the gradient [N, R] of its weighted sum, and the overlap [N].
    """
    logits_NC, label_N1 = logits_NR.gather(1, candidates_NC), labels_N.clamp(min=0)[:, None]
    label_logits_N = logits_NR.gather(1, label_N1)[:, 0]
    normaliser_N = logits_NR.logsumexp(-1)
    draft_NC = (logits_NC - normaliser_N[:, None]).exp()
    overlap_N = torch.minimum(draft_NC, probs_NC).sum(-1)
    has_label_N = (labels_N >= 0).float()
    slope = loss(
        Positions(logits_NC, normaliser_N, draft_NC, probs_NC, label_logits_N, has_label_N,
                  overlap_N)
    )  # fmt: skip
    gradient_NR = logits_NR.sub_(normaliser_N[:, None]).exp_()
    gradient_NR.mul_((slope.all_N * weights_N)[:, None])
    gradient_NR.scatter_add_(1, candidates_NC, slope.candidates_NC * weights_N[:, None])
    gradient_NR.scatter_add_(1, label_N1, (slope.label_N * weights_N)[:, None])
    return slope.value_N, gradient_NR, overlap_N
