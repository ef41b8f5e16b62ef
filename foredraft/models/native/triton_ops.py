"""Kernels of a decoding step on GPUs, in Triton: products, rotation, attention over paged entries.

Every sum runs in one order, whatever is scored together. Products take tiles of 16 tokens and add
up all inputs of an output in one program; attention takes the context in stretches of a fixed size,
whose sums are joined in the order of the text. So a token has the same bits alone and among others,
which `tests/models/test_triton.py` and `benchmarks/gpu.py` compare.

A token attends to entries in the order of its text: to the committed ones of its slot, then along
its path through the draft. A tree's nodes thus add up what they will add up once they are kept.

Import this module only where Triton is installed (see `cuda.why_not_paged`).

Shape legend: N tokens, K inputs, M outputs, H query heads, G key-value heads, P query heads that
share a key-value head, D head size, B entries of a block, T tokens of a grid's row, S stretches.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE = 16
"""Tokens of a product's tile; the least that matrix units take."""
HOPPER = 90
"""Its capability."""
_BLACKWELL = 100
_HOPPER_SHARED = 227 << 10
"""Shared memory of its programs, and of Blackwell's in data centres."""
_Tiles = dict[str, int]
"""Sizes of a product's tile, its warps and its stages, by their names in the kernel."""
_JOINED = 8
"""Stretches that are joined at once."""


class AttentionSizes(NamedTuple):
    """Of attention, always the same: other sizes give other bits.

    Attributes:
        queries: of a tile, tokens times the heads that share keys.
        keys: that a tile looks at together.
        stretch: entries whose sums one program makes.
    """

    queries: int = 64
    keys: int = 64
    stretch: int = 64
    warps: int = 4
    stages: int = 1


_LARGE = AttentionSizes(keys=128, stretch=128)
"""Of heads with more than 64 numbers: partial sums cost more there than waiting for keys."""
_LARGE_IN_REGISTERS = AttentionSizes(keys=64, stretch=128, warps=8)
"""The same where matrix units read no operand from shared memory: registers hold no more."""


class Norm(NamedTuple):
    """An RMS norm: weights [K], to which ``offset`` is added."""

    weight_K: Tensor
    eps: float
    offset: float = 0.0


@triton.jit
def activated(total, ups, ACTIVATION: tl.constexpr):
    """Gates activated as `ACTIVATIONS` names, times ups; without an activation ``total`` itself."""
    if ACTIVATION == 1:
        total = total / (1.0 + tl.exp(-total)) * ups
    if ACTIVATION == 2:
        inner = 0.7978845608028654 * (total + 0.044715 * total * total * total)
        tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
        total = 0.5 * total * (1.0 + tanh) * ups
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    num_tokens,
    num_outputs,
    num_inputs,
    eps,
    norm_offset,
    scale,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of outputs; with an activation, of gates and of ups, which lie behind all gates."""
    tokens = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    outputs = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    inputs = tl.arange(0, TILE_K)
    is_token = tokens < num_tokens
    is_output = outputs < num_outputs
    x_at = x + tokens.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    weight_at = weight + outputs.to(tl.int64)[None, :] * num_inputs + inputs[:, None]
    up_at = weight_at + num_outputs.to(tl.int64) * num_inputs
    if EARLY:
        gdc_wait()
    sums = tl.zeros((TILE_N, TILE_M), tl.float32)
    ups = tl.zeros((TILE_N, TILE_M), tl.float32)
    squares = tl.zeros((TILE_N,), tl.float32)
    for first in range(0, num_inputs, TILE_K):
        x_mask = is_token[:, None]
        weight_mask = is_output[None, :]
        if not EVEN:
            x_mask = x_mask & (first + inputs < num_inputs)[None, :]
            weight_mask = weight_mask & (first + inputs < num_inputs)[:, None]
        part = tl.load(x_at + first, mask=x_mask, other=0.0)
        if HAS_NORM:
            whole = part.to(tl.float32)
            squares += tl.sum(whole * whole, 1)
            if EVEN:
                norms = tl.load(norm + first + inputs)
            else:
                norms = tl.load(norm + first + inputs, mask=first + inputs < num_inputs, other=0.0)
            part = (whole * (norms.to(tl.float32) + norm_offset)[None, :]).to(part.dtype)
        weights = tl.load(weight_at + first, mask=weight_mask, other=0.0)
        sums = tl.dot(part, weights, sums, input_precision="ieee")
        if ACTIVATION != 0:
            weights = tl.load(up_at + first, mask=weight_mask, other=0.0)
            ups = tl.dot(part, weights, ups, input_precision="ieee")
    if EARLY:
        gdc_launch_dependents()
    if HAS_NORM:
        factors = 1.0 / tl.sqrt(squares / num_inputs + eps)
        sums = sums * factors[:, None]
        ups = ups * factors[:, None]
    sums = activated(sums, ups, ACTIVATION)
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    mask = is_token[:, None] & is_output[None, :]
    place = tokens.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    if HAS_RESIDUAL:
        sums = sums * scale + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer"])
def _rotate_kernel(
    qkv,
    cosines,
    sines,
    query_norm,
    key_norm,
    query,
    keys,
    values,
    blocks,
    offsets,
    layer,
    eps,
    norm_offset,
    block_stride,
    layer_stride,
    NUM_QUERY: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of one token: normed, rotated, and put where attention will look for it."""
    if EARLY:
        gdc_wait()
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, PADDED_HEAD)
    inside = at < HEAD
    source = qkv + (token.to(tl.int64) * (NUM_QUERY + 2 * NUM_KV) + head) * HEAD
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    half: tl.constexpr = ROTATED // 2
    partner = tl.where(at < half, at + half, at - half)
    turns = at < ROTATED
    if head < NUM_QUERY + NUM_KV:
        if HAS_NORM:
            factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HEAD + eps)
            norm = query_norm if head < NUM_QUERY else key_norm
            x = (
                x
                * factor
                * (tl.load(norm + at, mask=inside, other=0.0).to(tl.float32) + norm_offset)
            )
        if ROTATED:
            other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
            if HAS_NORM:
                others = tl.load(norm + partner, mask=turns, other=0.0).to(tl.float32)
                other = other * factor * (others + norm_offset)
            row = token.to(tl.int64) * ROTATED + at
            cosine = tl.load(cosines + row, mask=turns, other=1.0).to(tl.float32)
            sine = tl.load(sines + row, mask=turns, other=0.0).to(tl.float32)
            x = x * cosine + other * sine
    if EARLY:
        gdc_launch_dependents()
    if head < NUM_QUERY:
        place = query + (token.to(tl.int64) * NUM_QUERY + head) * HEAD + at
        tl.store(place, x.to(query.dtype.element_ty), mask=inside)
    else:
        group = (head - NUM_QUERY) % NUM_KV
        entry = tl.load(blocks + token) * block_stride + layer * layer_stride
        entry += (group * BLOCK + tl.load(offsets + token)) * HEAD
        if head < NUM_QUERY + NUM_KV:
            tl.store(keys + entry + at, x.to(keys.dtype.element_ty), mask=inside)
        else:
            tl.store(values + entry + at, x.to(values.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        *("layer", "window", "table_size", "row_tokens", "tile_tokens", "num_stretches")
    ]
)
def _attend_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    starts,
    paths,
    sums,
    peaks,
    layer,
    scale,
    cap,
    window,
    block_stride,
    layer_stride,
    table_size,
    row_tokens,
    tile_tokens,
    num_stretches,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STRETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Split-KV attention: a tile of queries over one stretch of keys, by online softmax.

    Writes sums of values, and of each query its largest score and its sum of weights.
    """
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * tile_tokens
    group = tl.program_id(1)
    stretch = tl.program_id(2)
    row = first // row_tokens
    at = tl.arange(0, QUERIES)
    tokens = first + at // SHARED
    heads = group * SHARED + at % SHARED
    is_query = at < tile_tokens * SHARED
    seen = tl.load(lengths + tokens, mask=is_query, other=0).to(tl.int32)
    most = tl.max(seen, 0)
    if stretch * STRETCH < most:
        start = tl.load(starts + row).to(tl.int32)
        dims = tl.arange(0, PADDED_HEAD)
        inside = dims < HEAD
        places = (tokens.to(tl.int64) * (GROUPS * SHARED) + heads) * HEAD
        is_query = seen > stretch * STRETCH
        mask = is_query[:, None] & inside[None, :]
        queries = tl.load(query + places[:, None] + dims[None, :], mask=mask, other=0.0)
        peak = tl.full((QUERIES,), float("-inf"), tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        total = tl.zeros((QUERIES, PADDED_HEAD), tl.float32)
        base = layer * layer_stride + group * (BLOCK * HEAD)
        last = tl.minimum(most, (stretch + 1) * STRETCH)
        for begin in range(stretch * STRETCH, last, KEYS):
            own = begin + tl.arange(0, KEYS)
            is_key = own < last
            drafted = is_key & (own >= start)
            step = tl.load(
                paths + first.to(tl.int64) * row_tokens + (own - start), mask=drafted, other=0
            )
            entry = tl.where(drafted, start + step.to(tl.int32), own)
            block = tl.load(tables + row * table_size + entry // BLOCK, mask=is_key, other=0)
            address = block * block_stride + base + (entry % BLOCK) * HEAD
            key_mask = is_key[None, :] & inside[:, None]
            key = tl.load(keys + address[None, :] + dims[:, None], mask=key_mask, other=0.0)
            scores = tl.dot(queries, key, input_precision="ieee") * scale
            if HAS_CAP:
                scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (scores / cap))))
            sees = (own[None, :] < seen[:, None]) & (own[None, :] >= seen[:, None] - window)
            scores = tl.where(sees, scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            fade = tl.exp(peak - level)
            chances = tl.exp(scores - level[:, None])
            weight = weight * fade + tl.sum(chances, 1)
            value_mask = is_key[:, None] & inside[None, :]
            value = tl.load(values + address[:, None] + dims[None, :], mask=value_mask, other=0.0)
            # Weights of 0 must cancel a sibling that is not finite; it knows itself by its scores.
            broken = drafted[:, None] & ~(tl.abs(value) < float("inf"))
            value = tl.where(broken, 0.0, value)
            part = tl.dot(chances.to(value.dtype), value, input_precision="ieee")
            total = total * fade[:, None] + part
            peak = higher
        if EARLY:
            gdc_launch_dependents()
        place = (tokens.to(tl.int64) * (GROUPS * SHARED) + heads) * num_stretches + stretch
        tl.store(sums + place[:, None] * HEAD + dims[None, :], total, mask=mask)
        tl.store(peaks + 2 * place, peak, mask=is_query)
        tl.store(peaks + 2 * place + 1, weight, mask=is_query)


@triton.jit(do_not_specialize=["num_stretches"])
def _join_kernel(
    sums,
    peaks,
    lengths,
    out,
    out_sums,
    num_stretches,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    STRETCH: tl.constexpr,
    JOINED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of one token: its stretches joined, in their order.

    With the sums of 32 outputs each, as `triton_packed.Inputs` has them.
    """
    if EARLY:
        gdc_wait()
    token = tl.program_id(0)
    head = tl.program_id(1)
    seen = tl.load(lengths + token).to(tl.int32)
    count = (seen + STRETCH - 1) // STRETCH
    dims = tl.arange(0, PADDED_HEAD)
    inside = dims < HEAD
    at = (token.to(tl.int64) * HEADS + head) * num_stretches
    peak = tl.full((), float("-inf"), tl.float32)
    weight = tl.zeros((), tl.float32)
    total = tl.zeros((PADDED_HEAD,), tl.float32)
    for begin in range(0, count, JOINED):
        some = begin + tl.arange(0, JOINED)
        is_some = some < count
        tops = tl.load(peaks + 2 * (at + some), mask=is_some, other=float("-inf"))
        weights = tl.load(peaks + 2 * (at + some) + 1, mask=is_some, other=0.0)
        mask = is_some[:, None] & inside[None, :]
        parts = tl.load(sums + (at + some)[:, None] * HEAD + dims[None, :], mask=mask, other=0.0)
        higher = tl.maximum(peak, tl.max(tops, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(peak - level)
        fades = tl.exp(tops - level)
        weight = weight * fade + tl.sum(weights * fades, 0)
        total = total * fade + tl.sum(parts * fades[:, None], 0)
        peak = higher
    if EARLY:
        gdc_launch_dependents()
    total = total / tl.where(weight == 0.0, 1.0, weight)
    place = out + (token.to(tl.int64) * HEADS + head) * HEAD + dims
    rounded = total.to(out.dtype.element_ty)
    tl.store(place, rounded, mask=inside)
    if HAS_SUMS:
        of_groups = tl.sum(tl.reshape(rounded.to(tl.float32), (HEAD // 32, 32)), 1)
        groups = head * (HEAD // 32) + tl.arange(0, HEAD // 32)
        at = token.to(tl.int64) * (HEADS * HEAD // 16) + group_at(groups)
        store_sums(out_sums + at, of_groups, None)


@triton.jit
def group_at(groups):
    """Where the first number of a group's sum is among those of a token."""
    return groups // 8 * 16 + groups % 8


@triton.jit
def store_sums(at, sums, mask):
    """Sums as two numbers each, which lie 8 apart."""
    upper = sums.to(at.dtype.element_ty)
    tl.store(at, upper, mask=mask)
    tl.store(at + 8, (sums - upper.to(tl.float32)).to(at.dtype.element_ty), mask=mask)


class Card(NamedTuple):
    """The GPU that kernels are launched on.

    Attributes:
        shared: bytes of shared memory that a program can have.
        capability: as 80 of an A100, or 90 of Hopper.
    """

    shared: int
    capability: int


def card_of(x: Tensor) -> Card:
    """The GPU of a tensor; on a CPU kernels are interpreted, and nothing has a limit."""
    if x.is_cpu:
        return Card(1 << 30, 0)
    return _card(triton.runtime.driver.active.get_current_device())


@cache  # each launch asks
def _card(device: int) -> Card:
    active = triton.runtime.driver.active
    properties = active.utils.get_device_properties(device)
    return Card(properties["max_shared_mem"], active.get_current_target().arch)


def launch(x: Tensor) -> dict[str, bool]:
    """From Hopper on a kernel is launched while the one before it ends, and waits by itself.

    From Blackwell on the compiler computes pairs of numbers together, and fuses products with sums
    in some rows of a tile only: bits would depend on a token's place. So it fuses none.
    """
    capability = card_of(x).capability
    options = {"enable_fp_fusion": capability < _BLACKWELL, "EARLY": capability >= HOPPER}
    return options | ({"launch_pdl": True} if options["EARLY"] else {})


def _tiles(num_outputs: int, num_inputs: int, gated: bool, itemsize: int, shared: int) -> _Tiles:
    """The tile of a product by its shape and the card: never by the number of tokens."""
    tiles = _large_tiles(num_outputs, num_inputs, gated, itemsize > 2)
    while _shared_bytes(tiles, gated, itemsize) > shared:
        if tiles["num_stages"] > 2:
            tiles["num_stages"] -= 1
        else:
            tiles["TILE_K"] //= 2
    return tiles


def _shared_bytes(tiles: _Tiles, gated: bool, itemsize: int) -> int:
    """Shared memory of a product's program, at most: inputs have a stage more, to be normed."""
    inputs = 2 * TILE * tiles["TILE_K"] * itemsize
    weights = tiles["TILE_M"] * tiles["TILE_K"] * itemsize * (2 if gated else 1)
    return tiles["num_stages"] * (inputs + weights) - weights + 1024


def _large_tiles(num_outputs: int, num_inputs: int, gated: bool, is_wide: bool) -> _Tiles:
    """Tiles for the shared memory of Hopper."""
    if is_wide and num_inputs >= 1024:  # shared memory holds no more of them
        return {"TILE_M": 32, "TILE_K": 64, "num_warps": 4, "num_stages": 4}
    if num_outputs >= 1 << 15:
        stages = 8 if num_inputs >= 1024 else 6
        return {"TILE_M": 64, "TILE_K": 64, "num_warps": 4, "num_stages": stages}
    if gated and num_inputs >= 1024:
        return {"TILE_M": 64, "TILE_K": 128, "num_warps": 8, "num_stages": 5}
    if num_outputs > 4096:
        return {"TILE_M": 32, "TILE_K": 256, "num_warps": 4, "num_stages": 3}
    if gated or num_outputs > 2048:
        return {"TILE_M": 32, "TILE_K": 64, "num_warps": 4, "num_stages": 8}
    if num_outputs * num_inputs <= 1 << 20:
        return {"TILE_M": 16, "TILE_K": 64, "num_warps": 4, "num_stages": 8}
    return {"TILE_M": 16, "TILE_K": 256, "num_warps": 4, "num_stages": 4}


ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}


def linear(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual_NM: Tensor | None = None,
    scale: float = 1.0,
    activation: str | None = None,
    dtype: torch.dtype | None = None,
    out_NM: Tensor | None = None,
    tiles: _Tiles | None = None,
) -> Tensor:
    """Products [N, M] of tokens and weights, float32 inside.

    Args:
        norm: of the inputs.
        residual_NM: ``scale`` times the products are added to it.
        activation: "silu" or "gelu_tanh" of the first half of the outputs, times the second.
        dtype: of the result; None: that of ``x_NK``.
        out_NM: where it goes; None: it is made.
        tiles: instead of those of the shape, to time others.
    """
    num_tokens, num_inputs = x_NK.shape
    num_outputs = len(weight_MK) // (2 if activation else 1)
    if out_NM is None:
        out_NM = x_NK.new_empty((num_tokens, num_outputs), dtype=dtype or x_NK.dtype)
    tiles = tiles or _tiles(
        *(num_outputs, num_inputs, activation is not None, x_NK.dtype.itemsize),
        card_of(x_NK).shared,
    )
    tile = TILE if num_tokens <= TILE else 2 * TILE
    grid = (triton.cdiv(num_tokens, tile), triton.cdiv(num_outputs, tiles["TILE_M"]))
    nothing = weight_MK
    norm_K, eps, offset = norm or Norm(nothing, 0.0)
    _linear_kernel[grid](
        *(x_NK, weight_MK, nothing if bias_M is None else bias_M, norm_K),
        *(nothing if residual_NM is None else residual_NM, out_NM),
        *(num_tokens, num_outputs, num_inputs, eps, offset, scale),
        HAS_NORM=norm is not None,
        HAS_BIAS=bias_M is not None,
        HAS_RESIDUAL=residual_NM is not None,
        ACTIVATION=ACTIVATIONS[activation],
        EVEN=num_inputs % tiles["TILE_K"] == 0,
        TILE_N=tile,
        **launch(x_NK),
        **tiles,
    )
    return out_NM


def rotate_and_store(
    qkv_NX: Tensor,
    num_query: int,
    head_dim: int,
    store: tuple[Tensor, Tensor],
    layer: int,
    blocks_N: Tensor,
    offsets_N: Tensor,
    *,
    rotation: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Queries [N, H, D], normed and rotated; keys, likewise, and values go to the cache.

    Args:
        qkv_NX: queries, keys and values of all heads, [N, (H + 2 G) D].
        store: keys and values of all layers, [blocks, layers, G, B, D].
        rotation: cosines and signed sines [N, P] (see `model.rotate`).
        norms: of queries and of keys, alike but for their weights [D].
    """
    keys, values = store
    num_tokens, num_kv, block = len(qkv_NX), keys.shape[2], keys.shape[3]
    query_NHD = qkv_NX.new_empty((num_tokens, num_query, head_dim))
    cosines, sines = rotation or (qkv_NX, qkv_NX)
    (query_norm, eps, offset), (key_norm, *_) = norms or (Norm(qkv_NX, 0.0),) * 2
    _rotate_kernel[(num_tokens, num_query + 2 * num_kv)](
        *(qkv_NX, cosines, sines, query_norm, key_norm, query_NHD, keys, values),
        *(blocks_N, offsets_N, layer, eps, offset, keys.stride(0), keys.stride(1)),
        NUM_QUERY=num_query,
        NUM_KV=num_kv,
        HEAD=head_dim,
        PADDED_HEAD=triton.next_power_of_2(head_dim),
        BLOCK=block,
        ROTATED=rotation[0].shape[1] if rotation else 0,
        HAS_NORM=norms is not None,
        **launch(qkv_NX),
        num_warps=1,
    )
    return query_NHD


def attend(
    query_NHD: Tensor,
    store: tuple[Tensor, Tensor],
    layer: int,
    tables_RM: Tensor,
    lengths_N: Tensor,
    starts_R: Tensor,
    paths_NT: Tensor,
    *,
    context: int,
    is_chain: bool,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    out_sums: Tensor | None = None,
    sizes: AttentionSizes | None = None,
) -> Tensor:
    """Attention of a grid's tokens over their slots' entries; [N, H, D].

    Args:
        store: see `rotate_and_store`; it holds the tokens' own entries already.
        tables_RM: the blocks of each of R rows.
        lengths_N: how many entries a token sees, its own included; 0 for padding, which gives 0.
        starts_R: how many of them all tokens of a row see before the row's own.
        paths_NT: what a token sees of its row's own, in their order.
        context: no token sees more entries.
        is_chain: whether the tokens of each row see one another as in a chain: then several
            share the work, and ``paths_NT`` counts from 0 in each of them.
        out_sums: where the sums of groups go, of heads of 32, 64, 128 or 256 numbers.
        sizes: to time others than those of the head size.
    """
    keys, values = store
    num_tokens, num_heads, head_dim = query_NHD.shape
    sizes = sizes or _attention_sizes(head_dim, keys.itemsize, card_of(query_NHD))
    row_tokens, groups, block = paths_NT.shape[1], keys.shape[2], keys.shape[3]
    shared = num_heads // groups
    tile_tokens = min(row_tokens, _whole_power(sizes.queries // shared)) if is_chain else 1
    padded_head = max(16, triton.next_power_of_2(head_dim))
    num_stretches = triton.cdiv(context, sizes.stretch)
    sums = query_NHD.new_empty(
        (num_tokens, num_heads, num_stretches, head_dim), dtype=torch.float32
    )
    peaks = query_NHD.new_empty((num_tokens, num_heads, num_stretches, 2), dtype=torch.float32)
    _attend_kernel[(num_tokens // tile_tokens, groups, num_stretches)](
        *(query_NHD, keys, values, tables_RM, lengths_N, starts_R, paths_NT, sums, peaks),
        *(layer, scale, cap or 1.0, window or 1 << 30, keys.stride(0), keys.stride(1)),
        *(tables_RM.shape[1], row_tokens, tile_tokens, num_stretches),
        GROUPS=groups,
        SHARED=shared,
        HEAD=head_dim,
        PADDED_HEAD=padded_head,
        BLOCK=block,
        HAS_CAP=cap is not None,
        QUERIES=sizes.queries,
        KEYS=sizes.keys,
        STRETCH=sizes.stretch,
        **launch(query_NHD),
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    out_NHD = torch.empty_like(query_NHD)
    _join_kernel[(num_tokens, num_heads)](
        *(sums, peaks, lengths_N, out_NHD, out_NHD if out_sums is None else out_sums),
        num_stretches,
        HEADS=num_heads,
        HEAD=head_dim,
        PADDED_HEAD=padded_head,
        STRETCH=sizes.stretch,
        JOINED=_JOINED,
        HAS_SUMS=out_sums is not None,
        **launch(query_NHD),
        num_warps=1,
    )
    return out_NHD


def _attention_sizes(head_dim: int, itemsize: int, card: Card) -> AttentionSizes:
    """By the head and the card: never by the number of tokens."""
    if head_dim <= 64:
        return AttentionSizes()
    sizes = _LARGE if card.shared >= _HOPPER_SHARED else _LARGE_IN_REGISTERS
    padded: int = triton.next_power_of_2(head_dim)

    def shared(keys: int) -> int:
        return ((sizes.queries + keys) * padded + sizes.queries * keys) * itemsize + 1024

    while shared(sizes.keys) > card.shared:
        sizes = sizes._replace(keys=sizes.keys // 2)
    return sizes


def _whole_power(count: int) -> int:
    """The largest power of two that is not above ``count``, at least 1."""
    return 1 << max(count, 1).bit_length() - 1
