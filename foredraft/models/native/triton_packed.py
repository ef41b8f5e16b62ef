"""Products with weights that stay in few bits on the GPU, in Triton.

A weight is an integer times the scale of the inputs around it, in some formats plus a minimum. The
integers of 32 inputs, which share a scale, are multiplied as they are with bfloat16 activations;
their sum, float32, is then multiplied with the scale, and the minimum with the sum of these
activations. So no weight is rounded, and each group costs its scale once. Every sum runs in one
order, whatever is scored together: groups in the order of inputs, the stretches of a split product
in theirs.

Import this module only where Triton is installed (see `cuda.why_not_paged`).

Shape legend: N tokens, K inputs, M outputs, C chunks of 64 inputs, B groups of inputs.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foredraft.models.native.quant import (
    Blocks,
    Form,
    PackedMatrix,
    Stack,
    StackedMatrix,
)
from foredraft.models.native.triton_ops import (
    ACTIVATIONS,
    HOPPER,
    Norm,
    activated,
    card_of,
    group_at,
    launch,
    linear,
    store_sums,
)
from foredraft.models.native.weights import DecoderWeights, LayerWeights

TILE = 16
"""Tokens of a product's tile, at most: the matrix units take eight at a time."""
CHUNK = 64
"""Inputs whose integers lie together."""

_FOURTHS = """{
    .reg .b32 two, three, four, zero;
    shr.u32 two, $4, 4;
    shr.u32 three, $4, 8;
    shr.u32 four, $4, 12;
    mov.b32 zero, ZERO;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, two, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $2, three, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, four, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 $0, $0, zero;
    sub.bf16x2 $1, $1, zero;
    sub.bf16x2 $2, $2, zero;
    sub.bf16x2 $3, $3, zero;
    }"""
"""Fourths of two words, as bfloat16. 0x4300 is 128: its last bits count ones."""
_HALVES = """{
    .reg .b32 upper, zero;
    shr.u32 upper, $2, 8;
    lop3.b32 zero, $2, 0x00800080, 0x43004300, 0xAE;
    lop3.b32 $0, $2, 0x007F007F, 0x43004300, 0xEA;
    sub.bf16x2 $0, $0, zero;
    lop3.b32 zero, upper, 0x00800080, 0x43004300, 0xAE;
    lop3.b32 $1, upper, 0x007F007F, 0x43004300, 0xEA;
    sub.bf16x2 $1, $1, zero;
    }"""
"""Halves of two words less 128, as bfloat16. The upper bit of one says whether 128 or 256 (0x4380)
is to be taken from 128 and the others."""


def _assembly(x: Tensor, bits: int, centre: int) -> str | None:
    """PTX that converts two words of integers to bfloat16; None: Triton converts them."""
    if x.is_cpu or x.dtype != torch.bfloat16 or bits > 8:
        return None
    return _code(bits, centre, card_of(x).capability >= HOPPER)


@cache
def _code(bits: int, centre: int, subtracts: bool) -> str:
    code = _FOURTHS if bits == 4 else _HALVES
    code = code.replace("ZERO", f"0x{0x43004300 + centre * 0x00010001:X}")
    if subtracts:
        return code
    # There is no subtraction of bfloat16 yet: the zero is multiplied with -1 and added.
    code = re.sub(r"sub(.bf16x2 \$.), (\$.), zero", r"fma.rn\1, zero, minus, \2", code)
    return "{ .reg .b32 minus; mov.b32 minus, 0xBF80BF80;" + code[1:]


@triton.jit
def _fourths(packed, CENTRE: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """4 bits each of words, the lowest first, less ``CENTRE``; they are exact in ``dtype``."""
    if ASM is not None:
        found = tl.inline_asm_elementwise(
            *(ASM, "=r,=r,=r,=r,r", [packed]),
            *((tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2),
        )
    else:
        found = (
            ((packed & 15).to(tl.float32) - CENTRE).to(dtype),
            (((packed >> 4) & 15).to(tl.float32) - CENTRE).to(dtype),
            (((packed >> 8) & 15).to(tl.float32) - CENTRE).to(dtype),
            (((packed >> 12) & 15).to(tl.float32) - CENTRE).to(dtype),
        )
    return found


@triton.jit
def _halves(packed, ASM: tl.constexpr, dtype: tl.constexpr):
    """8 bits each of words, the lower first, less 128; they are exact in ``dtype``."""
    if ASM is not None:
        found = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        found = (
            ((packed & 255).to(tl.float32) - 128.0).to(dtype),
            (((packed >> 8) & 255).to(tl.float32) - 128.0).to(dtype),
        )
    return found


@triton.jit
def _scale(words, UPPER: tl.constexpr):
    """One of the two float16 numbers in each word, as float32."""
    if UPPER:
        words = words >> 16
    return (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _inputs(
    x_at, first, wanted, num_inputs, BEGIN: tl.constexpr, END: tl.constexpr, EVEN: tl.constexpr
):
    """32 inputs from ``first`` on, of which those before BEGIN and from END on are zeros."""
    mask = wanted
    inputs = tl.arange(0, 32)
    if END - BEGIN < 32:
        mask = mask & ((inputs >= BEGIN) & (inputs < END))[:, None]
    if not EVEN:
        mask = mask & (first + inputs < num_inputs)[:, None]
    return tl.load(x_at + first, mask=mask, other=0.0)


@triton.jit
def _scaled(part, x, scales, UPPER: tl.constexpr):
    """Products of integers and inputs that share a scale."""
    return tl.dot(part, x, input_precision="ieee") * _scale(scales, UPPER)[:, None]


@triton.jit
def _unpacked(
    packed_at,
    run,
    num_rows,
    mask,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    ASM: tl.constexpr,
    dtype: tl.constexpr,
):
    """The integers of a run: of 128 inputs, or of 64 twice."""
    found = tl.load(packed_at + run * num_rows * 32, mask=mask[:, None], other=0)
    if BITS == 4:
        parts = _fourths(found, CENTRE, ASM, dtype)
    else:
        lower, upper = _halves(found, ASM, dtype)
        parts = lower, upper, lower, upper
    return parts


@triton.jit
def _add_chunk(
    total,
    lower,
    upper,
    x_at,
    chunk,
    wanted,
    num_inputs,
    scales_at,
    num_rows,
    mask,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Add the product of 64 inputs to ``total`` [outputs, tokens], without the minima's part.

    Where 16 inputs share a scale, 32 come twice: with zeros for the last 16, and for the first.
    """
    begin = chunk * 64
    if GROUP == 32:
        scales = tl.load(scales_at + chunk * num_rows, mask=mask, other=0)
        x = _inputs(x_at, begin, wanted, num_inputs, 0, 32, EVEN)
        total += _scaled(lower, x, scales, False)
        x = _inputs(x_at, begin + 32, wanted, num_inputs, 0, 32, EVEN)
        total += _scaled(upper, x, scales, True)
    else:
        scales = tl.load(scales_at + 2 * chunk * num_rows, mask=mask, other=0)
        x = _inputs(x_at, begin, wanted, num_inputs, 0, 16, EVEN)
        total += _scaled(lower, x, scales, False)
        x = _inputs(x_at, begin, wanted, num_inputs, 16, 32, EVEN)
        total += _scaled(lower, x, scales, True)
        scales = tl.load(scales_at + (2 * chunk + 1) * num_rows, mask=mask, other=0)
        x = _inputs(x_at, begin + 32, wanted, num_inputs, 0, 16, EVEN)
        total += _scaled(upper, x, scales, False)
        x = _inputs(x_at, begin + 32, wanted, num_inputs, 16, 32, EVEN)
        total += _scaled(upper, x, scales, True)
    return total


@triton.jit
def _add_minima(total, sums, minima_at, first, num_rows, mask):
    """Add the minima's part of the product, of eight groups from chunk ``first`` on.

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
    active,
    partials,
    counters,
    num_tokens,
    num_outputs,
    num_inputs,
    num_rows,
    expert_rows,
    num_experts,
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
        tile = tl.program_id(2) % num_tiles
        place = tl.program_id(2) // num_tiles
        listed = active + tile * (num_experts + 1)
        if place >= tl.load(listed):
            return
        expert = tl.load(listed + 1 + place)
        tokens = tile * TILE_N + tl.arange(0, TILE_N)
        slots = tl.arange(0, PADDED_SLOTS)
        is_slot = (tokens < num_tokens)[:, None] & (slots < SLOTS)[None, :]
        found = tl.load(chosen + tokens[:, None] * SLOTS + slots[None, :], mask=is_slot, other=-1)
        own = (found == expert).to(tl.int32)
        is_token = tl.sum(own, 1) > 0
        entries = tokens * SLOTS + tl.sum(own * slots[None, :], 1)
        sources = entries if FROM_SLOTS else tokens
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
        if BITS == 16:
            for i in tl.static_range(8):
                begin_at = first * 64 + 32 * i
                x_part = _inputs(x_at, begin_at, wanted, num_inputs, 0, 32, EVEN)
                at = packed + rows[:, None] * num_inputs + begin_at + inputs[None, :]
                mask = is_output[:, None]
                if not EVEN:
                    mask = mask & (begin_at + inputs < num_inputs)[None, :]
                part = tl.load(at, mask=mask, other=0.0)
                total = tl.dot(part, x_part, total, input_precision="ieee")
                if ACTIVATION != 0:
                    part = tl.load(at + ups_from * num_inputs, mask=mask, other=0.0)
                    ups = tl.dot(part, x_part, ups, input_precision="ieee")
        else:
            packed_at = packed + rows[:, None] * 32 + inputs[None, :]
            scales_at = scales + rows
            for i in tl.static_range(4 * BITS // 8):
                run = first * BITS // 8 + i
                one, two, three, four = _unpacked(
                    *(packed_at, run, num_rows, is_output, BITS, CENTRE, ASM, x.dtype.element_ty)
                )
                chunk = first + i * 8 // BITS
                total = _add_chunk(
                    *(total, one, two, x_at, chunk, wanted, num_inputs, scales_at, num_rows),
                    *(is_output, GROUP, EVEN),
                )
                if BITS == 4:
                    total = _add_chunk(
                        *(total, three, four, x_at, chunk + 1, wanted, num_inputs, scales_at),
                        *(num_rows, is_output, GROUP, EVEN),
                    )
                if ACTIVATION != 0:
                    one, two, three, four = _unpacked(
                        *(packed_at + ups_from * 32, run, num_rows, is_output, BITS, CENTRE, ASM),
                        x.dtype.element_ty,
                    )
                    ups = _add_chunk(
                        *(ups, one, two, x_at, chunk, wanted, num_inputs, scales_at + ups_from),
                        *(num_rows, is_output, GROUP, EVEN),
                    )
                    if BITS == 4:
                        ups = _add_chunk(
                            *(ups, three, four, x_at, chunk + 1, wanted, num_inputs),
                            *(scales_at + ups_from, num_rows, is_output, GROUP, EVEN),
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
    total = activated(total, ups, ACTIVATION)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = entries.to(tl.int64)[None, :] * out_stride + outputs[:, None]
    if HAS_RESIDUAL:
        total = total * factor + tl.load(residual + place, mask=stored, other=0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty)
    tl.store(out + place, total, mask=stored)
    if HAS_OUT_SUMS:
        # As a product: a sum along an axis has another order in a tile of another size.
        within = tl.arange(0, 16)
        ones = (tl.arange(0, TILE_M)[None, :] // 32 == within[:, None]).to(total.dtype)
        whole = tl.where(is_output[:, None], total, 0.0).to(total.dtype)
        of_groups = tl.dot(ones, whole, input_precision="ieee")
        groups = tl.program_id(0) * (TILE_M // 32) + within
        place = entries.to(tl.int64)[None, :] * (num_outputs // 16) + group_at(groups)[:, None]
        is_stored = is_token & (tl.sum(stored.to(tl.int32), 0) > 0)
        is_group = (within < TILE_M // 32) & (groups < num_outputs // 32)
        mask = is_group[:, None] & is_stored[None, :]
        store_sums(out_sums + place, of_groups, mask)


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
        place = sums + token * (2 * num_groups) + group_at(groups)
        store_sums(place, of_groups, groups < num_groups)


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
            found = tl.load(at + chunk // 2 * num_rows * 32, mask=mask, other=0)
            shift = (chunk % 2 * 8 + 4 * half).to(tl.int16)
            integers = ((found >> shift) & 15).to(tl.float32) - CENTRE
        else:
            found = tl.load(at + chunk * num_rows * 32, mask=mask, other=0)
            integers = ((found >> 8 * half) & 255).to(tl.float32) - 128.0
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
        numbers = numbers.to(out.dtype.element_ty)
        tl.store(place, numbers, mask=mask & (columns < num_inputs)[None, :])


_PART = 512
_PIECE = 1 << 25
"""Weights that are numbers at once."""


@dataclass(frozen=True)
class CardMatrix(PackedMatrix):
    """A matrix [M, K] in few bits, laid out for the card.

    A row has runs of 32 words of 16 bits, and the first run of all rows comes before the second, so
    that a tile of rows reads one stretch. Word i of a run of 128 inputs has in 4 bits each inputs
    i, 32 + i, 64 + i and 96 + i, from the lowest on; one of 64 inputs those of 8 bits likewise.
    Inputs are filled up to 256 with scales of 0.

    Attributes:
        packed_GCN: int16 [runs, M, 32]. Integers of 8 bits, into which 5 and 6 are brought, are
            stored with 128 added.
        scales: int32 [C, M], two float16 numbers of 32 inputs each; [2 C, M] of 16 inputs each.
            Products of scales and their steps are rounded to float16.
        minima: float16 [2 C, M] of 32 inputs each; None: there are none.
        counters: of the tiles of split products; zeros.
    """

    scales: Tensor
    minima: Tensor | None
    counters: Tensor

    @property
    def integer_bits(self) -> int:
        """4 or 8."""
        return 4 if self.form.bits == 4 and not self.form.codes else 8

    @property
    def centre(self) -> int:
        """The zero point of integers of 4 bits: 0 or 8."""
        return 8 if self.integer_bits == 4 and self.form.is_signed else 0

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 32 if len(self.scales) == self.num_chunks else 16

    @property
    def num_chunks(self) -> int:
        """C."""
        return len(self.packed_GCN) * 8 // self.integer_bits

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
    def of(cls, matrix: PackedMatrix, device: torch.device) -> CardMatrix:
        """Bring a matrix into this form on the card, some rows at a time."""
        num_rows, num_inputs = matrix.shape
        made = cls.empty(matrix.form, num_rows, num_inputs, device)
        for first, blocks in matrix.in_pieces(device):
            made._put(slice(first, first + len(blocks.integers_RBK)), blocks)
        return made

    @classmethod
    def rounded(cls, form: Form, weight_RK: Tensor) -> CardMatrix:
        """Round a matrix where it is, some rows at a time."""
        assert form.rounded is not None
        num_rows, num_inputs = weight_RK.shape
        made = cls.empty(form, num_rows, num_inputs, weight_RK.device)
        for first in range(0, num_rows, _ROUNDED):
            rows = slice(first, min(first + _ROUNDED, num_rows))
            made._put(rows, form.rounded(weight_RK[rows].float()))
        return made

    @classmethod
    def empty(cls, form: Form, num_rows: int, num_inputs: int, device: torch.device) -> CardMatrix:
        """One without numbers, for what comes in a form."""
        chunks = -(-num_inputs // (4 * CHUNK)) * 4
        fields = {name: count for name, count, _ in form.head}

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        is_half = form.bits == 4 and not form.codes
        return cls(
            form,
            zeros(torch.int16, chunks // 2 if is_half else chunks, num_rows, 32),
            (num_rows,),
            num_inputs,
            scales=zeros(torch.int32, chunks * fields["scales_RB"] // 2, num_rows),
            minima=zeros(torch.float16, 2 * chunks, num_rows) if "minima_RB" in fields else None,
            counters=zeros(torch.int32, -(-num_rows // _LEAST_TILE) * _MOST_TILES),
        )

    def _put(self, rows: slice, blocks: Blocks) -> None:
        chunks = self.num_chunks

        def padded(found_RB: Tensor, count: int) -> Tensor:
            return F.pad(found_RB, (0, count - found_RB.shape[1]))

        integers_RK = padded(blocks.integers_RBK.flatten(1), chunks * CHUNK)
        per_word = 16 // self.integer_bits
        zero = self.centre if per_word == 4 else 128
        parts = (integers_RK.to(torch.int16) + zero).view(-1, len(self.packed_GCN), per_word, 32)
        words_RC = parts[:, :, 0]
        for i in range(1, per_word):
            words_RC = words_RC | parts[:, :, i] << i * self.integer_bits
        self.packed_GCN[:, rows] = words_RC.transpose(0, 1)
        scales_RB = padded(blocks.numbers("scales_RB").half(), 2 * len(self.scales)).contiguous()
        self.scales[:, rows] = scales_RB.view(torch.int32).T
        if self.minima is not None:
            minima_RB = padded(blocks.numbers("minima_RB").half(), 2 * chunks)
            self.minima[:, rows] = minima_RB.T


_ROUNDED = 4096
"""Rows that are rounded at once."""
_LEAST_TILE, _MOST_TILES = 32, 16
"""Outputs and token tiles."""
_PROGRAMS, _GATED_PROGRAMS = 512, 256
"""A product is split until it has as many, or its stretches are short."""


def _tiles(num_outputs: int, num_chunks: int, gated: bool) -> dict[str, int]:
    """The tile of a product by its shape alone: never by the number of tokens."""
    tiles, splits, iterations = -(-num_outputs // 64), 1, num_chunks // 4
    while tiles * splits < (_GATED_PROGRAMS if gated else _PROGRAMS) and iterations >= 4 * splits:
        splits *= 2
    stages = 2 if gated or iterations <= 2 * splits else 3
    return {"TILE_M": 64, "SPLITS": splits, "STAGES": stages, "num_warps": 2}


_EXPERT_TILES = {"TILE_M": 32, "SPLITS": 1, "STAGES": 3, "num_warps": 2}
"""An expert's matrices are small: more programs share them."""


def prepared(x_NK: Tensor, norm: Norm | None, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """Normed inputs [N, K], and sums of their groups for minima; None: no groups are asked for."""
    if norm is None and not num_groups:
        return x_NK, None
    num_tokens, num_inputs = x_NK.shape
    out_NK = x_NK if norm is None else torch.empty_like(x_NK)
    norm_K, eps, offset = norm or Norm(x_NK, 0.0)
    sums = x_NK.new_empty((num_tokens, 2 * num_groups)) if num_groups else None
    parts = triton.cdiv(max(num_inputs, 32 * num_groups), _PART)
    _prepare_kernel[(num_tokens, parts)](
        *(x_NK, norm_K, out_NK, x_NK if sums is None else sums),
        *(num_inputs, num_groups, eps, offset),
        HAS_NORM=norm is not None,
        HAS_SUMS=sums is not None,
        PADDED=triton.next_power_of_2(num_inputs),
        PART=_PART,
        **launch(x_NK),
        num_warps=4,
    )
    return out_NK, sums


def token_tile(num_tokens: int) -> int:
    """Tokens of a tile; a token's bits are those of eight in any."""
    return TILE // 2 if num_tokens <= TILE // 2 else TILE


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
        active: int32 [token tiles, 1 + X], how many there are in each tile of tokens, and which.
        num_experts: how many there are.
        from_slots: whether inputs lie in slots, too: [N S, K]; else each token has its own.
    """

    experts_NS: Tensor
    active: Tensor
    num_experts: int
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
    count, slots = (chosen.num_experts, chosen.experts_NS.shape[1]) if chosen else (1, 0)
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
    if tiles is None and chosen:
        tiles = _EXPERT_TILES
    tiles = dict(tiles or _tiles(num_outputs, num_chunks, activation is not None))
    splits = tiles.pop("SPLITS")
    num_tiles, tile = triton.cdiv(num_outputs, tiles["TILE_M"]), token_tile(num_tokens)
    most = min(count, tile * max(slots, 1))
    grid = (num_tiles, splits, most * triton.cdiv(num_tokens, tile))
    partials = nothing
    if splits > 1:
        size = 2 * splits * tiles["TILE_M"] * tile
        partials = x_NK.new_empty((grid[0] * grid[2], size), dtype=torch.float32)
    _product_kernel[grid](
        *(x_NK, nothing if sums is None else sums, *operands),
        *(nothing if bias_M is None else bias_M, nothing if residual_NM is None else residual_NM),
        *(out_NM, nothing if out_sums is None else out_sums),
        *(chosen.experts_NS if chosen else nothing, chosen.active if chosen else nothing),
        *(partials, counters, num_tokens, num_outputs, num_inputs, num_rows, num_rows // count),
        *(count, num_chunks),
        *(out_NM.stride(0), scale),
        **form,
        HAS_BIAS=bias_M is not None,
        HAS_RESIDUAL=residual_NM is not None,
        HAS_OUT_SUMS=out_sums is not None,
        ACTIVATION=ACTIVATIONS[activation],
        SLOTS=slots,
        PADDED_SLOTS=triton.next_power_of_2(max(slots, 1)),
        FROM_SLOTS=bool(chosen and chosen.from_slots),
        EVEN=num_inputs % (4 * CHUNK) == 0,
        IS_SPLIT=splits > 1,
        TILE_N=tile,
        ASM=_assembly(x_NK, form["BITS"], form["CENTRE"]),
        **launch(x_NK),
        **tiles,
    )
    return out_NM


def multiply(
    inputs: Tensor | Inputs,
    weight: Stack,
    bias_M: Tensor | None = None,
    *,
    norm: Norm | None = None,
    out_sums: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """As `triton_ops.linear`, with weights in few bits, too.

    Args:
        norm: of the inputs, where their sums are not known.
        out_sums: see `product`.
        options: ``residual_NM``, ``scale``, ``activation``, ``dtype`` and ``out_NM``; of stacked
            weights none.
    """
    x_NK, sums = inputs if isinstance(inputs, Inputs) else (inputs, None)
    if isinstance(weight, Tensor):
        return linear(x_NK, weight, bias_M, norm=norm, **options)
    if sums is None:
        x_NK, sums = prepared(x_NK, norm, num_groups(weight))
    if isinstance(weight, CardMatrix):
        return product(x_NK, weight, bias_M, sums=sums, out_sums=out_sums, **options)
    assert isinstance(weight, StackedMatrix)
    assert not options
    rows = [part.shape[0] for part in weight.parts]
    out_NM = x_NK.new_empty((len(x_NK), sum(rows)))
    biases = [None] * len(rows) if bias_M is None else torch.split(bias_M, rows)
    for part, bias, out in zip(weight.parts, biases, torch.split(out_NM, rows, 1), strict=True):
        assert isinstance(part, CardMatrix)
        product(x_NK, part, bias, sums=sums, out_NM=out)
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

    Of a matrix with gates and ups in formats of their own, or with minima for 16 inputs, no product
    is known: it is dequantised.
    """

    def moved(_: str, matrix: Any, num_parts: int) -> Any:
        if isinstance(matrix, CardMatrix):
            return matrix
        parts = matrix.parts if isinstance(matrix, StackedMatrix) else (matrix,)
        if any(isinstance(part, PackedMatrix) and part.form.has_fine_minima for part in parts):
            return matrix.dequantised(weights.dtype).to(device)
        if isinstance(matrix, StackedMatrix):
            if num_parts > 1:
                return matrix.dequantised(weights.dtype).to(device)
            return StackedMatrix(tuple(moved("", part, 1) for part in matrix.parts))
        return CardMatrix.of(matrix, device) if isinstance(matrix, PackedMatrix) else matrix

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
