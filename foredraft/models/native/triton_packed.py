"""Products with weights that stay in few bits on the GPU, in Triton.

A weight is an integer times the scale of the inputs around it, in some formats plus a minimum. The
integers of 32 inputs, which share a scale, are multiplied as they are with bfloat16 activations;
their sum, float32, is then multiplied with the scale, and the minimum with the sum of these
activations. So no weight is rounded, and each group costs its scale once. Every sum runs in one
order, whatever is scored together: groups in the order of inputs, the stretches of a split product
in theirs.

Import this module only where Triton is installed (see `cuda.graphed_decoder`).

Shape legend: N tokens, K inputs, M outputs, C chunks of 64 inputs, B groups of inputs.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foredraft.models.native.quant import (
    Blocks,
    PackedMatrix,
    QuantisedMatrix,
    Stack,
    StackedMatrix,
)
from foredraft.models.native.triton_ops import linear
from foredraft.models.native.weights import DecoderWeights, LayerWeights

TILE = 16
"""Tokens of a product's tile."""
CHUNK = 64
"""Inputs whose integers lie together."""

_UNPACKED = """{
    .reg .b32 low, high;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    lop3.b32 $0, low, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, high, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 low, low, 4;
    shr.u32 high, high, 4;
    lop3.b32 $2, low, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, high, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 low, ZERO;
    sub.bf16x2 $0, $0, low;
    sub.bf16x2 $1, $1, low;
    sub.bf16x2 $2, $2, low;
    sub.bf16x2 $3, $3, low;
    }"""
_FROM_0 = tl.constexpr(_UNPACKED.replace("ZERO", "0x43004300"))
_FROM_8 = tl.constexpr(_UNPACKED.replace("ZERO", "0x43084308"))
"""Lower and upper halves of four bytes, as bfloat16. 0x4300 is 128: its last bits count ones."""
_BYTES = tl.constexpr(
    """{
    .reg .b32 one, two, three, four;
    .reg .f32 a, b, c, d;
    prmt.b32 one, $2, 0x4B000000, 0x7440;
    prmt.b32 two, $2, 0x4B000000, 0x7441;
    prmt.b32 three, $2, 0x4B000000, 0x7442;
    prmt.b32 four, $2, 0x4B000000, 0x7443;
    mov.b32 a, one; mov.b32 b, two; mov.b32 c, three; mov.b32 d, four;
    sub.f32 a, a, 0f4B000080;
    sub.f32 b, b, 0f4B000080;
    sub.f32 c, c, 0f4B000080;
    sub.f32 d, d, 0f4B000080;
    mov.b32 one, a; mov.b32 two, b; mov.b32 three, c; mov.b32 four, d;
    prmt.b32 $0, one, two, 0x7632;
    prmt.b32 $1, three, four, 0x7632;
    }"""
)
"""Four bytes less 128, as bfloat16: integers of 8 bits with a sign lose nothing."""


@triton.jit
def _halves(packed, CENTRE: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """Lower and upper halves of bytes, less ``CENTRE``; both are exact in ``dtype``."""
    if ASM:
        if CENTRE == 0:
            lower, upper = tl.inline_asm_elementwise(
                _FROM_0, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4
            )
        else:
            lower, upper = tl.inline_asm_elementwise(
                _FROM_8, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4
            )
    else:
        lower = ((packed & 15).to(tl.float32) - CENTRE).to(dtype)
        upper = ((packed >> 4).to(tl.float32) - CENTRE).to(dtype)
    return lower, upper


@triton.jit
def _bytes(packed, ASM: tl.constexpr, dtype: tl.constexpr):
    """Bytes less 128; they are exact in ``dtype``."""
    if ASM:
        found = tl.inline_asm_elementwise(_BYTES, "=r,=r,r", [packed], tl.bfloat16, True, 4)
    else:
        found = (packed.to(tl.float32) - 128.0).to(dtype)
    return found


@triton.jit
def _scale(words, UPPER: tl.constexpr):
    """One of the two float16 numbers in each word, as float32."""
    if UPPER:
        words = words >> 16
    return (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _inputs(
    x_at,
    first,
    inputs,
    wanted,
    num_inputs,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    EVEN: tl.constexpr,
):
    """32 inputs from ``first`` on, of which those before BEGIN and from END on are zeros."""
    mask = wanted
    if END - BEGIN < 32:
        mask = mask & ((inputs >= BEGIN) & (inputs < END))[:, None]
    if not EVEN:
        mask = mask & (first + inputs < num_inputs)[:, None]
    return tl.load(x_at + first, mask=mask, other=0.0)


@triton.jit
def _add_chunk(
    total,
    first_x,
    second_x,
    first_end_x,
    second_end_x,
    packed_at,
    scales_at,
    chunk,
    num_rows,
    mask,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
):
    """What 64 inputs add to ``total`` [outputs, tokens], minima left out.

    Where 16 inputs share a scale, 32 come twice: with zeros for the last 16, and for the first.
    """
    dtype: tl.constexpr = first_x.dtype
    if BITS == 4:
        both = tl.load(packed_at + chunk * num_rows * 32, mask=mask[:, None], other=0)
        first, second = _halves(both, CENTRE, ASM, dtype)
    else:
        first = tl.load(packed_at + 2 * chunk * num_rows * 32, mask=mask[:, None], other=0)
        second = tl.load(packed_at + (2 * chunk + 1) * num_rows * 32, mask=mask[:, None], other=0)
        first, second = _bytes(first, ASM, dtype), _bytes(second, ASM, dtype)
    if GROUP == 32:
        words = tl.load(scales_at + chunk * num_rows, mask=mask, other=0)
        part = tl.dot(first, first_x, input_precision="ieee")
        total += part * _scale(words, False)[:, None]
        part = tl.dot(second, second_x, input_precision="ieee")
        total += part * _scale(words, True)[:, None]
    else:
        words = tl.load(scales_at + 2 * chunk * num_rows, mask=mask, other=0)
        part = tl.dot(first, first_x, input_precision="ieee")
        total += part * _scale(words, False)[:, None]
        part = tl.dot(first, first_end_x, input_precision="ieee")
        total += part * _scale(words, True)[:, None]
        words = tl.load(scales_at + (2 * chunk + 1) * num_rows, mask=mask, other=0)
        part = tl.dot(second, second_x, input_precision="ieee")
        total += part * _scale(words, False)[:, None]
        part = tl.dot(second, second_end_x, input_precision="ieee")
        total += part * _scale(words, True)[:, None]
    return total


@triton.jit
def _add_minima(total, sums, minima_at, first, num_rows, mask):
    """What the minima of eight groups add, from chunk ``first`` on.

    Minima and sums are split in two numbers of the dtype of ``sums`` each. No bit of a float16
    minimum is lost in bfloat16, and 16 remain of a sum.
    """
    groups = 2 * first + (tl.arange(0, 16) % 8).to(tl.int64)
    whole = tl.load(minima_at[:, None] + groups[None, :] * num_rows, mask=mask[:, None], other=0.0)
    whole = whole.to(tl.float32)
    upper = whole.to(sums.dtype)
    lower = (whole - upper.to(tl.float32)).to(sums.dtype)
    total = tl.dot(upper, sums, total, input_precision="ieee")
    return tl.dot(lower, sums, total, input_precision="ieee")


@triton.jit
def _finished(total, ups, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        total = total / (1.0 + tl.exp(-total)) * ups
    if ACTIVATION == 2:
        inner = 0.7978845608028654 * (total + 0.044715 * total * total * total)
        tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
        total = 0.5 * total * (1.0 + tanh) * ups
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    x,
    sums,
    packed,
    scales,
    minima,
    bias,
    residual,
    out,
    out_sums,
    chosen,
    partials,
    counters,
    num_tokens,
    num_outputs,
    num_inputs,
    num_rows,
    expert_rows,
    num_chunks,
    out_stride,
    factor,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OUT_SUMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    FROM_SLOTS: tl.constexpr,
    EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of outputs; with an activation, of gates and of ups, which lie behind all gates.

    With experts (SLOTS) those of one expert, for the tokens that chose it, and nothing without any.
    """
    split = tl.program_id(1)
    outputs = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    is_output = outputs < num_outputs
    inputs = tl.arange(0, 32)
    if EARLY:
        gdc_wait()
    num_iterations = num_chunks // 4
    splits = tl.num_programs(1)
    share = (num_iterations + splits - 1) // splits
    begin = split * share
    end = tl.minimum(begin + share, num_iterations)
    rows = outputs.to(tl.int64)
    if SLOTS > 0:
        num_tiles = (num_tokens + TILE_N - 1) // TILE_N
        expert = tl.program_id(2) // num_tiles
        tokens = tl.program_id(2) % num_tiles * TILE_N + tl.arange(0, TILE_N)
        slots = tl.arange(0, PADDED_SLOTS)
        is_slot = (tokens < num_tokens)[:, None] & (slots < SLOTS)[None, :]
        found = tl.load(chosen + tokens[:, None] * SLOTS + slots[None, :], mask=is_slot, other=-1)
        own = (found == expert).to(tl.int32)
        is_token = tl.sum(own, 1) > 0
        entries = tokens * SLOTS + tl.sum(own * slots[None, :], 1)
        sources = entries if FROM_SLOTS else tokens
        end = tl.where(tl.sum(tl.sum(own, 1), 0) > 0, end, begin)
        rows += expert.to(tl.int64) * expert_rows
    else:
        tokens = tl.program_id(2) * TILE_N + tl.arange(0, TILE_N)
        is_token = tokens < num_tokens
        entries = tokens
        sources = tokens
    sources = sources.to(tl.int64)
    ups_from = num_outputs.to(tl.int64)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    ups = tl.zeros((TILE_M, TILE_N), tl.float32)
    x_at = x + sources[None, :] * num_inputs + inputs[:, None]
    wanted = is_token[None, :]
    pairs = tl.arange(0, 16)
    origin = tl.full((), 0, tl.int64)
    for iteration in tl.range(begin, end, num_stages=STAGES):
        first = origin + iteration * 4
        for i in tl.static_range(4):
            chunk = first + i
            one = _inputs(x_at, chunk * 64, inputs, wanted, num_inputs, 0, 32, EVEN)
            two = _inputs(x_at, chunk * 64 + 32, inputs, wanted, num_inputs, 0, 32, EVEN)
            three, four = one, two
            if GROUP == 16:
                one = _inputs(x_at, chunk * 64, inputs, wanted, num_inputs, 0, 16, EVEN)
                two = _inputs(x_at, chunk * 64 + 32, inputs, wanted, num_inputs, 0, 16, EVEN)
                three = _inputs(x_at, chunk * 64, inputs, wanted, num_inputs, 16, 32, EVEN)
                four = _inputs(x_at, chunk * 64 + 32, inputs, wanted, num_inputs, 16, 32, EVEN)
            if BITS == 16:
                at = packed + rows[:, None] * num_inputs + chunk * 64 + inputs[None, :]
                mask = is_output[:, None]
                upper_mask = mask
                if not EVEN:
                    mask = mask & (chunk * 64 + inputs < num_inputs)[None, :]
                    upper_mask = upper_mask & (chunk * 64 + 32 + inputs < num_inputs)[None, :]
                part = tl.load(at, mask=mask, other=0.0)
                total = tl.dot(part, one, total, input_precision="ieee")
                part = tl.load(at + 32, mask=upper_mask, other=0.0)
                total = tl.dot(part, two, total, input_precision="ieee")
                if ACTIVATION != 0:
                    part = tl.load(at + ups_from * num_inputs, mask=mask, other=0.0)
                    ups = tl.dot(part, one, ups, input_precision="ieee")
                    part = tl.load(at + ups_from * num_inputs + 32, mask=upper_mask, other=0.0)
                    ups = tl.dot(part, two, ups, input_precision="ieee")
            else:
                packed_at = packed + rows[:, None] * 32 + inputs[None, :]
                total = _add_chunk(
                    *(total, one, two, three, four, packed_at, scales + rows, chunk, num_rows),
                    *(is_output, BITS, CENTRE, GROUP, ASM),
                )
                if ACTIVATION != 0:
                    packed_at += ups_from * 32
                    ups = _add_chunk(
                        *(ups, one, two, three, four, packed_at, scales + rows + ups_from, chunk),
                        *(num_rows, is_output, BITS, CENTRE, GROUP, ASM),
                    )
        if HAS_MIN:
            at = sums + sources[None, :] * (num_chunks * 4) + first * 4 + pairs[:, None]
            of_groups = tl.load(at, mask=wanted, other=0.0)
            total = _add_minima(total, of_groups, minima + rows, first, num_rows, is_output)
            if ACTIVATION != 0:
                upper_at = minima + rows + ups_from
                ups = _add_minima(ups, of_groups, upper_at, first, num_rows, is_output)
    if EARLY:
        gdc_launch_dependents()
    stored = is_output[:, None] & wanted
    if IS_SPLIT:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = TILE_M * TILE_N
        within = tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
        at = partials + tile.to(tl.int64) * (2 * splits * size) + within
        tl.store(at + 2 * split * size, total)
        if ACTIVATION != 0:
            tl.store(at + (2 * split + 1) * size, ups)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        is_last = arrived == splits - 1
        tl.debug_barrier()
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        ups = tl.zeros((TILE_M, TILE_N), tl.float32)
        for one in range(tl.where(is_last, splits, 0)):
            total += tl.load(at + 2 * one * size, cache_modifier=".cg")
            if ACTIVATION != 0:
                ups += tl.load(at + (2 * one + 1) * size, cache_modifier=".cg")
        tl.store(counters + tile, 0, mask=is_last)
        stored = stored & is_last
    total = _finished(total, ups, ACTIVATION)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = entries.to(tl.int64)[None, :] * out_stride + outputs[:, None]
    if HAS_RESIDUAL:
        total = total * factor + tl.load(residual + place, mask=stored, other=0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty)
    tl.store(out + place, total, mask=stored)
    if HAS_OUT_SUMS:
        whole = tl.where(is_output[:, None], total, 0.0).to(tl.float32)
        of_groups = tl.sum(tl.reshape(whole, (TILE_M // 32, 32, TILE_N)), 1)
        groups = tl.program_id(0) * (TILE_M // 32) + tl.arange(0, TILE_M // 32)
        place = entries.to(tl.int64)[None, :] * (num_outputs // 16) + _group_at(groups)[:, None]
        is_stored = is_token & (tl.sum(stored.to(tl.int32), 0) > 0)
        mask = (groups < num_outputs // 32)[:, None] & is_stored[None, :]
        _store_sums(out_sums + place, of_groups, mask)


@triton.jit
def _group_at(groups):
    """Where the first number of a group's sum is among those of a token."""
    return groups // 8 * 16 + groups % 8


@triton.jit
def _store_sums(at, sums, mask):
    """Sums as two numbers each, which lie 8 apart."""
    upper = sums.to(at.dtype.element_ty)
    tl.store(at, upper, mask=mask)
    tl.store(at + 8, (sums - upper.to(tl.float32)).to(at.dtype.element_ty), mask=mask)


@triton.jit
def _prepare_kernel(
    x,
    norm,
    out,
    sums,
    num_inputs,
    num_groups,
    eps,
    norm_offset,
    HAS_NORM: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Of one token: normed inputs, and the sums of groups of 32, each as two numbers."""
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    source = x + token * num_inputs
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    part = tl.load(source + at, mask=at < num_inputs, other=0.0)
    if HAS_NORM:
        every = tl.arange(0, PADDED)
        whole = tl.load(source + every, mask=every < num_inputs, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / num_inputs + eps)
        weight = tl.load(norm + at, mask=at < num_inputs, other=0.0).to(tl.float32)
        part = (part.to(tl.float32) * factor * (weight + norm_offset)).to(x.dtype.element_ty)
        tl.store(out + token * num_inputs + at, part, mask=at < num_inputs)
    if EARLY:
        gdc_launch_dependents()
    if HAS_SUMS:
        of_groups = tl.sum(tl.reshape(part.to(tl.float32), (PART // 32, 32)), 1)
        groups = tl.program_id(1) * (PART // 32) + tl.arange(0, PART // 32)
        place = sums + token * (2 * num_groups) + _group_at(groups)
        _store_sums(place, of_groups, groups < num_groups)


@triton.jit
def _unpack_kernel(
    packed,
    scales,
    minima,
    indices,
    out,
    first_row,
    count,
    num_rows,
    num_inputs,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MIN: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Weights of some rows as numbers: 64 inputs of each of TILE_M rows."""
    places = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    is_row = places < count
    if HAS_INDICES:
        rows = tl.load(indices + places, mask=is_row, other=0)
    else:
        rows = first_row + places.to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    inputs = tl.arange(0, 32)
    at = packed + rows[:, None] * 32 + inputs[None, :]
    mask = is_row[:, None]
    for half in tl.static_range(2):
        if BITS == 4:
            both = tl.load(at + chunk * num_rows * 32, mask=mask, other=0)
            integers = ((both >> 4 * half) & 15).to(tl.float32) - CENTRE
        else:
            one = tl.load(at + (2 * chunk + half) * num_rows * 32, mask=mask, other=0)
            integers = one.to(tl.float32) - 128.0
        if GROUP == 32:
            words = tl.load(scales + chunk * num_rows + rows, mask=is_row, other=0)
            numbers = integers * _scale(words, half == 1)[:, None]
        else:
            words = tl.load(scales + (2 * chunk + half) * num_rows + rows, mask=is_row, other=0)
            lower, upper = _scale(words, False), _scale(words, True)
            numbers = integers * tl.where(inputs[None, :] < 16, lower[:, None], upper[:, None])
        if HAS_MIN:
            below = tl.load(minima + (2 * chunk + half) * num_rows + rows, mask=is_row, other=0.0)
            numbers += below.to(tl.float32)[:, None]
        columns = chunk * 64 + 32 * half + inputs
        place = out + places.to(tl.int64)[:, None] * num_inputs + columns[None, :]
        found = numbers.to(out.dtype.element_ty)
        tl.store(place, found, mask=mask & (columns < num_inputs)[None, :])


def launch(x: Tensor) -> dict[str, bool]:
    """On a GPU a kernel is launched while the one before it ends, and waits for it by itself."""
    return {"EARLY": True, "launch_pdl": True} if x.is_cuda else {"EARLY": False}


_ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
_PART = 512
_PIECE = 1 << 25
"""Weights that are numbers at once."""


@dataclass(frozen=True)
class CardMatrix(PackedMatrix):
    """A matrix [M, K] in few bits, laid out for the card.

    What 32 inputs of a row have lies in 32 bytes, and those of all rows behind one another, so that
    a tile of rows reads one stretch. Inputs are filled up to 256 with scales of 0.

    Attributes:
        packed_GCN: of 4 bits uint8 [C, M, 32], a byte holding inputs i and i + 32 of a chunk; of 8
            uint8 [2 C, M, 32], 128 more than the integer, into which 5 and 6 bits are brought.
        scales: int32 [C, M], two float16 numbers of 32 inputs each; [2 C, M] of 16 inputs each.
            Products of scales and their steps are rounded to float16.
        minima: float16 [2 C, M] of 32 inputs each; None: there are none.
        integer_bits: 4 or 8.
        centre: what stands for 0 of 4 bits: 0 or 8.
        counters: of the tiles of split products; zeros.
    """

    scales: Tensor
    minima: Tensor | None
    integer_bits: int
    centre: int
    stored_bits: int
    counters: Tensor

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.stored_bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 32 if len(self.scales) == self.num_chunks else 16

    @property
    def num_chunks(self) -> int:
        """C."""
        return len(self.packed_GCN) * 4 // self.integer_bits

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.packed_GCN, self.scales, self.minima) if x is not None]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return self.unpacked(0, self.shape[0], dtype)

    def rows(self, indices_R: Tensor, dtype: torch.dtype) -> Tensor:
        return self._unpack_rows(indices_R.to(self.scales.device), 0, len(indices_R), dtype)

    def unpacked(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` rows [R, K] from ``first`` on, as numbers."""
        return self._unpack_rows(None, first, count, dtype)

    def _unpack_rows(
        self, indices_R: Tensor | None, first: int, count: int, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty((count, self.num_inputs), dtype=dtype, device=self.scales.device)
        tile = 32
        used = -(-self.num_inputs // CHUNK)
        _unpack_kernel[(triton.cdiv(count, tile), used)](
            *(self.packed_GCN, self.scales, self.minima if self.minima is not None else out),
            *(out if indices_R is None else indices_R, out, first, count, self.shape[0]),
            self.num_inputs,
            BITS=self.integer_bits,
            CENTRE=self.centre,
            GROUP=self.group,
            HAS_MIN=self.minima is not None,
            HAS_INDICES=indices_R is not None,
            TILE_M=tile,
        )
        return out

    @classmethod
    def of(cls, matrix: QuantisedMatrix, device: torch.device) -> CardMatrix:
        """Bring a matrix into this form on the card, some rows at a time."""
        num_rows, num_inputs = matrix.shape
        made = cls.empty(type(matrix), num_rows, num_inputs, device)
        for first, blocks in matrix.in_pieces(device):
            made._put(slice(first, first + len(blocks.integers_RBK)), blocks)
        return made

    @classmethod
    def empty(
        cls, form: type[QuantisedMatrix], num_rows: int, num_inputs: int, device: torch.device
    ) -> CardMatrix:
        """One without numbers, for what comes in a form."""
        chunks, is_half = -(-num_inputs // (4 * CHUNK)) * 4, form.bits == 4
        fields = {name: count for name, count, _ in form.head}

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(torch.uint8, chunks if is_half else 2 * chunks, num_rows, 32),
            (num_rows,),
            num_inputs,
            scales=zeros(torch.int32, chunks * fields["scales_RB"] // 2, num_rows),
            minima=zeros(torch.float16, 2 * chunks, num_rows) if "minima_RB" in fields else None,
            integer_bits=4 if is_half else 8,
            centre=8 if is_half and form.is_signed else 0,
            stored_bits=form.bits,
            counters=zeros(torch.int32, -(-num_rows // _LEAST_TILE) * _MOST_TILES),
        )

    def _put(self, rows: slice, blocks: Blocks) -> None:
        chunks = self.num_chunks

        def padded(found_RB: Tensor, count: int) -> Tensor:
            return F.pad(found_RB, (0, count - found_RB.shape[1]))

        integers_RK = padded(blocks.integers_RBK.flatten(1), chunks * CHUNK)
        if self.integer_bits == 4:
            halves = (integers_RK + self.centre).view(-1, chunks, 2, 32).view(torch.uint8)
            packed_RC = halves[:, :, 0] | halves[:, :, 1] << 4
        else:
            packed_RC = (integers_RK.to(torch.int16) + 128).to(torch.uint8).view(-1, 2 * chunks, 32)
        self.packed_GCN[:, rows] = packed_RC.transpose(0, 1)
        scales_RB = padded(blocks.numbers("scales_RB").half(), 2 * len(self.scales)).contiguous()
        self.scales[:, rows] = scales_RB.view(torch.int32).T
        if self.minima is not None:
            minima_RB = padded(blocks.numbers("minima_RB").half(), 2 * chunks)
            self.minima[:, rows] = minima_RB.T


_LEAST_TILE, _MOST_TILES = 32, 16
"""Outputs and token tiles."""
_PROGRAMS = 256
"""A product is split until it has as many, or its stretches are short."""


def _tiles(num_outputs: int, num_chunks: int, gated: bool, bits: int) -> dict[str, int]:
    """The tile of a product by its shape alone: never by the number of tokens."""
    tiles, splits = -(-num_outputs // 64), 1
    while tiles * splits < _PROGRAMS and num_chunks // 4 >= 4 * splits:
        splits *= 2
    return {"TILE_M": 64, "SPLITS": splits, "STAGES": 3 if gated else 4, "num_warps": 2}


def prepared(
    x_NK: Tensor,
    norm_K: Tensor | None,
    eps: float,
    norm_offset: float,
    num_groups: int,
) -> tuple[Tensor, Tensor | None]:
    """Normed inputs [N, K], and sums of their groups for minima; None: no groups are asked for."""
    if norm_K is None and not num_groups:
        return x_NK, None
    num_tokens, num_inputs = x_NK.shape
    out_NK = x_NK if norm_K is None else torch.empty_like(x_NK)
    sums = x_NK.new_empty((num_tokens, 2 * num_groups)) if num_groups else None
    parts = triton.cdiv(max(num_inputs, 32 * num_groups), _PART)
    _prepare_kernel[(num_tokens, parts)](
        *(x_NK, x_NK if norm_K is None else norm_K, out_NK, x_NK if sums is None else sums),
        *(num_inputs, num_groups, eps, norm_offset),
        HAS_NORM=norm_K is not None,
        HAS_SUMS=sums is not None,
        PADDED=triton.next_power_of_2(num_inputs),
        PART=_PART,
        **launch(x_NK),
        num_warps=4,
    )
    return out_NK, sums


class Inputs(NamedTuple):
    """Inputs [N, K] of a product, with what is known of their sums.

    Attributes:
        sums: of groups of 32, two numbers [N, K / 16] each in runs of eight; None: not known.
    """

    x_NK: Tensor
    sums: Tensor | None


def room_for_sums(num_tokens: int, num_inputs: int, weight: Stack, like: Tensor) -> Tensor | None:
    """Where what gives inputs puts their sums; None: they are not needed, or not even."""
    is_even = num_inputs % (4 * CHUNK) == 0
    if not (is_even and num_groups(weight)):
        return None
    return like.new_empty((num_tokens, num_inputs // 16))


class Chosen(NamedTuple):
    """Experts of tokens.

    Attributes:
        experts_NS: int32, of each token in its slots; -1: none.
        count: how many there are.
        from_slots: whether inputs lie in slots, too: [N S, K]; else each token has its own.
    """

    experts_NS: Tensor
    count: int
    from_slots: bool


def product(
    x_NK: Tensor,
    weight_MK: CardMatrix | Tensor,
    bias_M: Tensor | None = None,
    *,
    sums: Tensor | None = None,
    residual_NM: Tensor | None = None,
    scale: float = 1.0,
    activation: str | None = None,
    dtype: torch.dtype | None = None,
    out_NM: Tensor | None = None,
    out_sums: Tensor | None = None,
    chosen: Chosen | None = None,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """Products [N, M] of tokens and weights; with experts [N S, M].

    Args:
        x_NK: see `prepared`.
        weight_MK: plain ones only of experts, whose matrices lie one below the other.
        sums: of groups of inputs, where the weights have minima.
        residual_NM: ``scale`` times the products are added to it.
        activation: "silu" or "gelu_tanh" of the first half of the outputs, times the second.
        dtype: of the result; None: that of ``x_NK``.
        out_NM: where it goes, some columns of a larger one as well; None: it is made.
        out_sums: where the sums of its own groups go (see `room_for_sums`).
        chosen: whose experts the weights are.
        tiles: instead of those of the shape, to time others.
    """
    num_rows, num_inputs = weight_MK.shape
    count, slots = (chosen.count, chosen.experts_NS.shape[1]) if chosen else (1, 0)
    num_tokens = len(chosen.experts_NS) if chosen else len(x_NK)
    num_outputs = num_rows // count // (2 if activation else 1)
    if out_NM is None:
        shape = (num_tokens * max(slots, 1), num_outputs)
        out_NM = x_NK.new_empty(shape, dtype=dtype or x_NK.dtype)
    nothing = x_NK
    if isinstance(weight_MK, CardMatrix):
        num_chunks, minima = weight_MK.num_chunks, weight_MK.minima
        operands = weight_MK.packed_GCN, weight_MK.scales, nothing if minima is None else minima
        form = {"BITS": weight_MK.integer_bits, "CENTRE": weight_MK.centre}
        form |= {"GROUP": weight_MK.group, "HAS_MIN": minima is not None}
        counters = weight_MK.counters
    else:
        num_chunks = -(-num_inputs // (4 * CHUNK)) * 4
        operands, counters = (weight_MK, nothing, nothing), nothing
        form = {"BITS": 16, "CENTRE": 0, "GROUP": 32, "HAS_MIN": False}
    assert sums is not None or not form["HAS_MIN"]
    tiles = dict(tiles or _tiles(num_outputs, num_chunks, activation is not None, form["BITS"]))
    splits = 1 if chosen else tiles["SPLITS"]
    del tiles["SPLITS"]
    num_tiles = triton.cdiv(num_outputs, tiles["TILE_M"])
    grid = (num_tiles, splits, count * triton.cdiv(num_tokens, TILE))
    partials = nothing
    if splits > 1:
        size = 2 * splits * tiles["TILE_M"] * TILE
        partials = x_NK.new_empty((grid[0] * grid[2], size), dtype=torch.float32)
    _product_kernel[grid](
        *(x_NK, nothing if sums is None else sums, *operands),
        *(nothing if bias_M is None else bias_M, nothing if residual_NM is None else residual_NM),
        *(out_NM, nothing if out_sums is None else out_sums),
        *(chosen.experts_NS if chosen else nothing, partials, counters),
        *(num_tokens, num_outputs, num_inputs, num_rows, num_rows // count, num_chunks),
        *(out_NM.stride(0), scale),
        **form,
        HAS_BIAS=bias_M is not None,
        HAS_RESIDUAL=residual_NM is not None,
        HAS_OUT_SUMS=out_sums is not None,
        ACTIVATION=_ACTIVATIONS[activation],
        SLOTS=slots,
        PADDED_SLOTS=triton.next_power_of_2(max(slots, 1)),
        FROM_SLOTS=bool(chosen and chosen.from_slots),
        EVEN=num_inputs % (4 * CHUNK) == 0,
        IS_SPLIT=splits > 1,
        TILE_N=TILE,
        ASM=x_NK.is_cuda and x_NK.dtype == torch.bfloat16 and form["BITS"] < 16,
        **launch(x_NK),
        **tiles,
    )
    return out_NM


def multiply(
    inputs: Tensor | Inputs,
    weight: Stack,
    bias_M: Tensor | None = None,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    residual_NM: Tensor | None = None,
    scale: float = 1.0,
    activation: str | None = None,
    dtype: torch.dtype | None = None,
    out_NM: Tensor | None = None,
    out_sums: Tensor | None = None,
) -> Tensor:
    """As `triton_ops.linear`, with weights in few bits, too; ``out_sums``: see `product`."""
    x_NK, sums = inputs if isinstance(inputs, Inputs) else (inputs, None)
    if isinstance(weight, Tensor):
        return linear(
            *(x_NK, weight, bias_M),
            norm_K=norm_K,
            eps=eps,
            norm_offset=norm_offset,
            residual_NM=residual_NM,
            scale=scale,
            activation=activation,
            dtype=dtype,
            out_NM=out_NM,
        )
    if sums is None:
        x_NK, sums = prepared(x_NK, norm_K, eps, norm_offset, num_groups(weight))
    if out_NM is None:
        num_outputs = weight.shape[0] // (2 if activation else 1)
        out_NM = x_NK.new_empty((len(x_NK), num_outputs), dtype=dtype or x_NK.dtype)
    first, parts = 0, weight.parts if isinstance(weight, StackedMatrix) else (weight,)
    for part in parts:
        columns = slice(first, first + part.shape[0])
        assert isinstance(part, CardMatrix)
        product(
            *(x_NK, part, None if bias_M is None else bias_M[columns]),
            sums=sums,
            residual_NM=residual_NM,
            scale=scale,
            activation=activation,
            out_NM=out_NM if len(parts) == 1 else out_NM[:, columns],
            out_sums=out_sums,
        )
        first += part.shape[0]
    return out_NM


def dequantised_product(x_NK: Tensor, weight: Stack, bias_M: Tensor | None) -> Tensor:
    """Of many tokens: some outputs at a time, whose weights are numbers while it runs."""
    if isinstance(weight, StackedMatrix):
        rows = [part.shape[0] for part in weight.parts]
        biases = [None] * len(rows) if bias_M is None else torch.split(bias_M, rows)
        parts = zip(weight.parts, biases, strict=True)
        return torch.cat([dequantised_product(x_NK, part, bias) for part, bias in parts], 1)
    assert isinstance(weight, CardMatrix)
    num_rows, num_inputs = weight.shape
    out_NM = x_NK.new_empty((len(x_NK), num_rows))
    at_once = max(_PIECE // num_inputs, 1)
    for first in range(0, num_rows, at_once):
        count = min(at_once, num_rows - first)
        columns = slice(first, first + count)
        bias = None if bias_M is None else bias_M[columns]
        out_NM[:, columns] = F.linear(x_NK, weight.unpacked(first, count, x_NK.dtype), bias)
    return out_NM


def on_card(weights: DecoderWeights, device: torch.device) -> DecoderWeights:
    """The same weights; matrices in few bits lie on the card as `product` reads them.

    Of a matrix with gates and ups in formats of their own no product is known: it is dequantised.
    """

    def moved(_: str, matrix: Stack, num_parts: int) -> Any:
        if isinstance(matrix, StackedMatrix):
            if num_parts > 1:
                return matrix.dequantised(weights.dtype).to(device)
            return StackedMatrix(tuple(moved("", part, 1) for part in matrix.parts))
        is_packed = isinstance(matrix, QuantisedMatrix)
        return CardMatrix.of(matrix, device) if is_packed else matrix

    def in_dtype(layer: LayerWeights) -> LayerWeights:
        plain = {
            name: x.to(weights.dtype) for name, x in vars(layer).items() if isinstance(x, Tensor)
        }
        return layer.with_fields(plain).with_matrices(moved)

    embedding = moved("", weights.embedding_VE, 1)
    is_tied = weights.head_VE is weights.embedding_VE
    return replace(
        weights,
        embedding_VE=embedding,
        layers=tuple(map(in_dtype, weights.layers)),
        final_norm_E=weights.final_norm_E.to(weights.dtype),
        head_VE=embedding if is_tied else moved("", weights.head_VE, 1),
    )


def num_groups(weight: Stack) -> int:
    """Groups of inputs whose sums its minima are multiplied with."""
    if isinstance(weight, StackedMatrix):
        return max(map(num_groups, weight.parts))
    has_minima = isinstance(weight, CardMatrix) and weight.minima is not None
    return 2 * weight.num_chunks if has_minima else 0  # type: ignore[union-attr]
