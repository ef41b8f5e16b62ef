"""Losses of a head's logits against the target's distribution.

A loss takes the figures of some positions (`Positions`) and returns its value at each. Logits are
many, so they are made, used and dropped piece by piece, the gradient with the value
(`product_loss`). With p the target's probability at temperature 1, q the head's and
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
"""Logits of one piece, such that its intermediate values fit the cores' caches."""
_GPU_ELEMENTS = 1 << 26
_PRODUCT_ELEMENTS = 1 << 26
"""Logits of one product, kept until their gradient has taken their place."""


@dataclass(frozen=True)
class Positions:
    """Some positions, as losses see them.

    Attributes:
        log_q_NC: the head's log probabilities of the candidates.
        p_NC: the target's probabilities, at temperature 1; they may sum up to less than 1.
        label_N: the head's log probability of the text's own token; 0 where it cannot name that.
        overlap_N: sum of the smaller of the two probabilities.
    """

    log_q_NC: Tensor
    p_NC: Tensor
    label_N: Tensor
    overlap_N: Tensor


Loss = Callable[[Positions], Tensor]


def soft_loss(x: Positions) -> Tensor:
    return -(x.p_NC * x.log_q_NC).sum(-1)


def hard_loss(x: Positions) -> Tensor:
    """Cross-entropy with the text itself; nothing where the head cannot name its token."""
    return -x.label_N


def tv_loss(x: Positions) -> Tensor:
    return 1.0 - x.overlap_N


def nla_loss(x: Positions) -> Tensor:
    least_N = x.overlap_N.detach().clamp(min=_SMALLEST)
    return (x.overlap_N.detach() - x.overlap_N) / least_N - least_N.log()


def lk_loss(x: Positions) -> Tensor:
    """Cross-entropy while the overlap is small, total variation once it is not."""
    weight_N = torch.exp(-_LK_RATE * x.overlap_N.detach())
    return weight_N * soft_loss(x) + (1 - weight_N) * tv_loss(x)


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
            summed += _in_place(logits_NR, goal, first, loss, overlap_N)
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


def _in_place(logits_NR: Tensor, goal: Goal, first: int, loss: Loss, overlap_N: Tensor) -> Tensor:
    """Turn logits, from position ``first`` on, into the gradient by them; the weighted sum."""
    limit = _CPU_ELEMENTS if logits_NR.device.type == "cpu" else _GPU_ELEMENTS
    summed = torch.zeros((), device=logits_NR.device)
    for piece_NR in torch.split(logits_NR, max(1, limit // logits_NR.shape[1])):
        places = slice(first, first + len(piece_NR))
        value, gradient_NR, overlap_N[places] = _piece_loss(piece_NR, goal, places, loss)
        piece_NR.copy_(gradient_NR)
        summed += value
        first = places.stop
    return summed


def _piece_loss(
    logits_NR: Tensor, goal: Goal, places: slice, loss: Loss
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of a loss at some positions, its gradient [N, R], and the overlap [N]."""
    rows_N, labels_N = goal.rows_N[places], goal.labels_N[places]
    candidates_NC, p_NC = goal.candidates_TC[rows_N], goal.probs_TC[rows_N]
    named_NX = torch.cat((candidates_NC, labels_N.clamp(min=0)[:, None]), 1)
    with torch.enable_grad():
        logits_NR = logits_NR.detach().float().requires_grad_()
        log_q_NX = logits_NR.gather(1, named_NX) - logits_NR.logsumexp(-1, keepdim=True)
        log_q_NC = log_q_NX[:, :-1]
        overlap_N = torch.minimum(log_q_NC.exp(), p_NC).sum(-1)
        label_N = torch.where(labels_N >= 0, log_q_NX[:, -1], 0.0)
        values_N = loss(Positions(log_q_NC, p_NC, label_N, overlap_N))
        summed = (values_N * goal.weights_N[places]).sum()
    (gradient_NR,) = torch.autograd.grad(summed, logits_NR)
    return summed.detach(), gradient_NR, overlap_N.detach()
