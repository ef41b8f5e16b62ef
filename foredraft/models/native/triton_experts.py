"""Mixtures of experts on GPUs, in Triton: shapes depend on no choice, and the host asks for none.

Each expert has programs of its own, which end at once where no token chose it. A token's sums are
those of its own experts, the likeliest first, whatever is scored together.

Import this module only where Triton is installed (see `cuda.why_not_paged`).

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
from foredraft.models.native.triton_ops import Norm, launch, linear
from foredraft.models.native.triton_packed import (
    TILE,
    CardMatrix,
    Chosen,
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
    active,
    num_tokens,
    num_experts,
    floor,
    factor,
    NUM_CHOSEN: tl.constexpr,
    SHARES: tl.constexpr,
    NORMALISED: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    TILE_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Of a tile of tokens: their likeliest experts, the first of equals, and which these are.

    A token that sees nothing is padding, and chooses none.
    """
    if EARLY:
        gdc_wait()
    tokens = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    is_token = tokens < num_tokens
    is_real = tl.load(lengths + tokens, mask=is_token, other=0) > 0
    every = tl.arange(0, PADDED)
    routed = num_experts - SHARES
    is_routed = (every < routed)[None, :]
    source = logits + tokens.to(tl.int64) * num_experts
    mask = is_token[:, None] & is_routed
    scores = tl.load(source[:, None] + every[None, :], mask=mask, other=float("-inf"))
    scores = tl.where(is_token[:, None], scores.to(tl.float32), 0.0)
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    weights = tl.where(is_routed, weights, -1.0)
    slots = tl.arange(0, PADDED_SLOTS)[None, :]
    own = tl.zeros((TILE_N, PADDED_SLOTS), tl.int32)
    parts = tl.zeros((TILE_N, PADDED_SLOTS), tl.float32)
    used = tl.zeros((PADDED,), tl.int32)
    for slot in range(NUM_CHOSEN):
        best = tl.max(weights, 1)
        index = tl.min(tl.where(weights == best[:, None], every[None, :], PADDED), 1)
        own = tl.where(slots == slot, index[:, None], own)
        parts = tl.where(slots == slot, best[:, None], parts)
        is_it = every[None, :] == index[:, None]
        used = tl.maximum(used, tl.max((is_it & is_real[:, None]).to(tl.int32), 0))
        weights = tl.where(is_it, -1.0, weights)
    if NORMALISED:
        parts = parts / (tl.sum(parts, 1)[:, None] + floor)
    parts *= factor
    if SHARES:
        gates = tl.load(source + routed, mask=is_token, other=0.0).to(tl.float32)
        own = tl.where(slots == NUM_CHOSEN, num_experts - 1, own)
        parts = tl.where(slots == NUM_CHOSEN, 1.0 / (1.0 + tl.exp(-gates))[:, None], parts)
        used = tl.where(every == routed, tl.max(is_real.to(tl.int32), 0), used)
    if EARLY:
        gdc_launch_dependents()
    count: tl.constexpr = NUM_CHOSEN + SHARES
    own = tl.where(is_real[:, None], own, -1)
    mask = is_token[:, None] & (slots < count)
    tl.store(experts + tokens[:, None] * count + slots, own, mask=mask)
    tl.store(chances + tokens[:, None] * count + slots, parts, mask=mask)
    listed = active + tl.program_id(0) * (num_experts + 1)
    tl.store(listed, tl.sum(used, 0))
    tl.store(listed + tl.cumsum(used, 0), every, mask=used > 0)


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


def route(
    logits_NX: Tensor, lengths_N: Tensor, experts: Experts, floor: float = 0.0
) -> tuple[Chosen, Tensor]:
    """Each token's experts, and their chances, float32 [N, S].

    Args:
        logits_NX: of the router.
        lengths_N: 0: padding, which chooses none.
        floor: added to the sum of chances that they are divided by.
    """
    num_tokens, num_experts = logits_NX.shape
    slots, device = experts.per_token, logits_NX.device
    tiles = triton.cdiv(num_tokens, TILE)  # of eight tokens chances add up in another order
    chosen_NS = torch.empty((num_tokens, slots), dtype=torch.int32, device=device)
    chances_NS = torch.empty((num_tokens, slots), device=device)
    active = torch.empty((tiles, 1 + num_experts), dtype=torch.int32, device=device)
    _route_kernel[(tiles,)](
        *(logits_NX, lengths_N, chosen_NS, chances_NS, active, num_tokens, num_experts),
        *(floor, experts.scale),
        NUM_CHOSEN=slots - experts.num_shared,
        SHARES=experts.num_shared,
        NORMALISED=experts.normalised,
        PADDED=triton.next_power_of_2(num_experts),
        PADDED_SLOTS=triton.next_power_of_2(slots),
        TILE_N=TILE,
        **launch(logits_NX),
        num_warps=4,
    )
    return Chosen(chosen_NS, active, num_experts, False), chances_NS


def mixture(
    hidden_NE: Tensor,
    layer: LayerWeights,
    experts: Experts,
    lengths_N: Tensor,
    *,
    norm: Norm | None,
    activation: str,
    scale: float | None,
    floor: float,
) -> Tensor:
    """``hidden_NE`` and ``scale`` times what each token's experts give; None: that alone."""
    gate_up, down, router_XE = layer.gate_up_weight, layer.down_weight, layer.router_XE
    assert router_XE is not None
    assert isinstance(gate_up, Tensor | CardMatrix)
    assert isinstance(down, Tensor | CardMatrix)
    normed_NE, sums = prepared(hidden_NE, norm, num_groups(gate_up))
    logits_NX = linear(normed_NE, router_XE)
    chosen, chances_NS = route(logits_NX, lengths_N, experts, floor)
    num_entries, num_inner = chances_NS.numel(), down.shape[1]
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
        _, sums = prepared(inner, None, num_groups(down))
    parts = product(inner, down, sums=sums, chosen=chosen._replace(from_slots=True))
    out_NE, size = torch.empty_like(hidden_NE), hidden_NE.shape[1]
    part = min(triton.next_power_of_2(size), 512)
    _gather_kernel[(len(hidden_NE), triton.cdiv(size, part))](
        *(parts, chosen.experts_NS, chances_NS, hidden_NE, out_NE, size, scale or 0.0),
        SLOTS=experts.per_token,
        HAS_RESIDUAL=scale is not None,
        PART=part,
        **launch(hidden_NE),
        num_warps=4,
    )
    return out_NE
