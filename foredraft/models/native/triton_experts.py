"""Mixtures of experts on GPUs, in Triton: shapes depend on no choice, and the host asks for none.

Each expert has programs of its own, which end at once where no token chose it. A token's sums are
those of its own experts, the likeliest first, whatever is scored together.

Import this module only where Triton is installed (see `cuda.graphed_decoder`).

Shape legend: N tokens, E hidden size, X experts, S slots (experts of a token).
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foredraft.models.native.config import Experts
from foredraft.models.native.triton_ops import linear
from foredraft.models.native.triton_packed import (
    CardMatrix,
    Chosen,
    launch,
    num_groups,
    prepared,
    product,
    room_for_sums,
)
from foredraft.models.native.weights import LayerWeights


@triton.jit
def _route_kernel(
    logits,
    lengths,
    experts,
    chances,
    num_experts,
    NUM_CHOSEN: tl.constexpr,
    SHARES: tl.constexpr,
    NORMALISED: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Of one token: its likeliest experts, the first of equals; none where it sees nothing."""
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PADDED)
    source = logits + token * num_experts
    routed = num_experts - SHARES
    scores = tl.load(source + every, mask=every < routed, other=float("-inf")).to(tl.float32)
    weights = tl.exp(scores - tl.max(scores, 0))
    weights = weights / tl.sum(weights, 0)
    weights = tl.where(every < routed, weights, -1.0)
    slots = tl.arange(0, PADDED_SLOTS)
    own = tl.zeros((PADDED_SLOTS,), tl.int32)
    parts = tl.zeros((PADDED_SLOTS,), tl.float32)
    for slot in range(NUM_CHOSEN):
        best = tl.max(weights, 0)
        index = tl.min(tl.where(weights == best, every, PADDED), 0)
        own = tl.where(slots == slot, index, own)
        parts = tl.where(slots == slot, best, parts)
        weights = tl.where(every == index, -1.0, weights)
    if NORMALISED:
        parts = parts / tl.sum(parts, 0)
    if SHARES:
        gate = tl.load(source + routed).to(tl.float32)
        own = tl.where(slots == NUM_CHOSEN, num_experts - 1, own)
        parts = tl.where(slots == NUM_CHOSEN, 1.0 / (1.0 + tl.exp(-gate)), parts)
    if EARLY:
        gdc_launch_dependents()
    count: tl.constexpr = NUM_CHOSEN + SHARES
    own = tl.where(tl.load(lengths + token) > 0, own, -1)
    tl.store(experts + token * count + slots, own, mask=slots < count)
    tl.store(chances + token * count + slots, parts, mask=slots < count)


@triton.jit
def _gather_kernel(
    parts,
    experts,
    chances,
    residual,
    out,
    size,
    factor,
    SLOTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PART: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some numbers of one token: what its experts give, by their chances, in the order of slots."""
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = at < size
    total = tl.zeros((PART,), tl.float32)
    for slot in tl.static_range(SLOTS):
        entry = token * SLOTS + slot
        mask = inside & (tl.load(experts + entry) >= 0)
        part = tl.load(parts + entry * size + at, mask=mask, other=0.0).to(tl.float32)
        total += part * tl.load(chances + entry)
    if EARLY:
        gdc_launch_dependents()
    place = token * size + at
    if HAS_RESIDUAL:
        total = total * factor + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def route(logits_NX: Tensor, lengths_N: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Each token's experts, int32 [N, S], and their chances, float32.

    Args:
        logits_NX: of the router.
        lengths_N: 0: padding, which chooses -1.
    """
    num_tokens, num_experts = logits_NX.shape
    slots = experts.per_token
    chosen_NS = torch.empty((num_tokens, slots), dtype=torch.int32, device=logits_NX.device)
    chances_NS = torch.empty((num_tokens, slots), device=logits_NX.device)
    _route_kernel[(num_tokens,)](
        *(logits_NX, lengths_N, chosen_NS, chances_NS, num_experts),
        NUM_CHOSEN=slots - experts.shares,
        SHARES=int(experts.shares),
        NORMALISED=experts.normalised,
        PADDED=triton.next_power_of_2(num_experts),
        PADDED_SLOTS=triton.next_power_of_2(slots),
        **launch(logits_NX),
        num_warps=1,
    )
    return chosen_NS, chances_NS


def mixture(
    hidden_NE: Tensor,
    layer: LayerWeights,
    experts: Experts,
    lengths_N: Tensor,
    *,
    eps: float,
    norm_offset: float,
    activation: str,
    scale: float | None,
) -> Tensor:
    """``hidden_NE`` and ``scale`` times what each token's experts give; None: that alone."""
    gate_up, down, router_XE = layer.gate_up_weight, layer.down_weight, layer.router_XE
    assert router_XE is not None
    assert isinstance(gate_up, Tensor | CardMatrix)
    assert isinstance(down, Tensor | CardMatrix)
    norm_K = layer.mlp_norm_E
    normed_NE, sums = prepared(hidden_NE, norm_K, eps, norm_offset, num_groups(gate_up))
    logits_NX = linear(normed_NE, router_XE)
    chosen_NS, chances_NS = route(logits_NX, lengths_N, experts)
    chosen = Chosen(chosen_NS, experts.count, False)
    num_entries, num_inner = chosen_NS.numel(), down.shape[1]
    inner_sums = room_for_sums(num_entries, num_inner, down, normed_NE)
    inner = product(
        *(normed_NE, gate_up),
        sums=sums,
        activation=activation,
        out_sums=inner_sums,
        chosen=chosen,
    )
    sums = inner_sums
    if sums is None:
        _, sums = prepared(inner, None, eps, norm_offset, num_groups(down))
    parts = product(inner, down, sums=sums, chosen=chosen._replace(from_slots=True))
    out_NE, size = torch.empty_like(hidden_NE), hidden_NE.shape[1]
    part = min(triton.next_power_of_2(size), 512)
    _gather_kernel[(len(hidden_NE), triton.cdiv(size, part))](
        *(parts, chosen_NS, chances_NS, hidden_NE, out_NE, size, scale or 0.0),
        SLOTS=experts.per_token,
        HAS_RESIDUAL=scale is not None,
        PART=part,
        **launch(hidden_NE),
        num_warps=4,
    )
    return out_NE
