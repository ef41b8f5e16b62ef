"""Draws where the logits are, on a GPU: the tokens of `draws.draw_rows` and of filtered laws.

The noise is that of `foredraft.core.noise`: the same integers, and the same operations on doubles
in the same order (kernels/gumbel.h), none of them contracted. So a token does not depend on where
it was drawn. Of the filters top-k has the same bits, too; weights for top-p and min-p are those of
kernels/filter.h, added up in another order of doubles.

Import this module only where Triton is installed.

Shape legend: N rows, V vocabulary, C chunks of a row.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.core.choices import DrawKey
from foredraft.core.draws import Array
from foredraft.core.sampling import Law

_CHUNK = 256
"""Tokens of a program that adds noise: few, for the doubles of one row are to fill a GPU."""
_LIST = 512
"""Sums of a program that lists the best ones: of one warp, whose lanes need not wait."""
_BLOCK = 8192
"""Tokens that filters look at together."""


@triton.jit
def _natural_log(x):
    """The logarithm of normal doubles > 0, as in kernels/gumbel.h."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = (bits - (exponent << 52)).to(tl.float64, bitcast=True) - 1.0
    k = exponent.to(tl.float64)
    s = f / (2.0 + f)
    z = s * s
    r = z * 0.0 + 2.0 / 21
    r = r * z + 2.0 / 19
    r = r * z + 2.0 / 17
    r = r * z + 2.0 / 15
    r = r * z + 2.0 / 13
    r = r * z + 2.0 / 11
    r = r * z + 2.0 / 9
    r = r * z + 2.0 / 7
    r = r * z + 2.0 / 5
    r = r * z + 2.0 / 3
    r = r * z
    half = 0.5 * f * f
    high: tl.constexpr = 0.6931471803691238  # 0x1.62e42feep-1
    low: tl.constexpr = 1.9082149292705877e-10  # 0x1.a39ef35793c76p-33
    return k * high - ((half - (s * (half + r) + k * low)) - f)


@triton.jit
def _philox(seed, position, index):
    """The words of `rng.philox4x32` of a position and purpose 0."""
    nothing = index * 0
    low = nothing + (position & 0xFFFFFFFF).to(tl.uint32)
    high = nothing + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, nothing, index)


@triton.jit
def _gumbel(seed, position, tokens):
    """The noise of tokens, which are uint32; see `foredraft.core.noise`."""
    w0, w1, w2, w3 = _philox(seed, position, (tokens >> 8) * 16 + ((tokens >> 2) & 15))
    word = (tokens >> 6) & 3
    w0 = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    coarse = (w0 >> (8 * (tokens & 3))) & 255
    f0, f1, _, _ = _philox(seed, position, tokens + 0x80000000)
    rarity = (coarse.to(tl.int64) << 44) | (f0.to(tl.int64) << 12) | (f1 >> 20).to(tl.int64)
    w = (2 * rarity + 1).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    return -_natural_log(-_natural_log(1.0 - w))


@triton.jit(do_not_specialize=["vocab"])
def _noise_kernel(
    logits,
    largest,
    cuts,
    keys,
    scales,
    names,
    sums,
    scores,
    tokens,
    vocab,
    HAS_CUTS: tl.constexpr,
    HAS_NAMES: tl.constexpr,
    KEEPS_SUMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best sum of logit and noise in a chunk of a row, and the first token that has it."""
    row, chunk, num_rows = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row.to(tl.int64) * vocab + at, mask=at < vocab, other=float("-inf"))
    if HAS_CUTS:
        logit = tl.where(logit < tl.load(cuts + row), float("-inf"), logit)
    scale, base = tl.load(scales + row), tl.zeros((), tl.float64)
    if HAS_CUTS or not HAS_NAMES:
        base = tl.load(largest + row).to(tl.float64)
    score = logit.to(tl.float64)
    if scale > 0.0:
        seed, position, name = tl.load(keys + row), tl.load(keys + num_rows + row), at
        if HAS_NAMES:
            name = tl.load(names + at, mask=at < vocab, other=0).to(tl.int32)
        score = (score - base) * scale + _gumbel(seed, position, name.to(tl.uint32))
    if KEEPS_SUMS:
        tl.store(sums + row.to(tl.int64) * vocab + at, score, mask=at < vocab)
    best = tl.max(score, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(scores + place, best)
    tl.store(tokens + place, tl.min(tl.where(score == best, at, vocab - 1), 0))


@triton.jit(do_not_specialize=["num_chunks"])
def _winner_kernel(
    largest,
    likeliest,
    cuts,
    names,
    scores,
    tokens,
    found,
    num_chunks,
    HAS_CUTS: tl.constexpr,
    HAS_NAMES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The winner of a row (-1: its logits are not finite), the likeliest token, bits of the cut."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, CHUNKS)
    score = tl.load(scores + row * num_chunks + at, mask=at < num_chunks, other=float("-inf"))
    first = tl.min(tl.where(score == tl.max(score, 0), at, CHUNKS - 1), 0)
    token = tl.load(tokens + row * num_chunks + first).to(tl.int64)
    if HAS_NAMES:
        tl.store(found + row, tl.load(names + token))
    else:
        token = tl.where(tl.abs(tl.load(largest + row)) < float("inf"), token, -1)
        tl.store(found + row, token)
        tl.store(found + num_rows + row, tl.load(likeliest + row))
    if HAS_CUTS:
        cut = tl.load(cuts + row).to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(found + 2 * num_rows + row, cut)


@triton.jit
def _exp_below(x, most):
    """e^(x - most), 0 where the number is minus infinity."""
    return tl.where(x > float("-inf"), tl.exp((x - most).to(tl.float32)), 0.0)


@triton.jit
def _best_keys(keys, target, COUNT: tl.constexpr):
    """Store the largest of distinct whole numbers, in falling order."""
    least: tl.constexpr = -(1 << 63)
    for place in range(COUNT):
        best = tl.max(keys, 0)
        tl.store(target + place, best)
        keys = tl.where(keys == best, least, keys)


@triton.jit(do_not_specialize=["vocab"])
def _list_kernel(sums, keys, tops, weights, vocab, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Keys of the best sums of a chunk, its largest sum, and the sum of exp below it.

    A key is a sum's place in the order of doubles, its last 20 bits those of the token, reversed.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(sums + row * vocab + at, mask=at < vocab, other=float("-inf"))
    bits = x.to(tl.int64, bitcast=True)
    order = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    key = (order >> 20 << 20) | (0xFFFFF - at).to(tl.int64)
    least: tl.constexpr = -(1 << 63)
    place = row * tl.num_programs(1) + chunk
    most = tl.max(x, 0)
    tl.store(tops + place, most)
    tl.store(weights + place, tl.sum(_exp_below(x, most), 0))
    _best_keys(tl.where(at < vocab, key, least), keys + place * COUNT, COUNT)


@triton.jit(do_not_specialize=["num_chunks"])
def _line_kernel(
    keys,
    tops,
    weights,
    names,
    best,
    lines,
    num_chunks,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A line of `listed`."""
    row = tl.program_id(0).to(tl.int64)
    at, least = tl.arange(0, LISTED), tl.full((), -(1 << 63), tl.int64)
    count = num_chunks * COUNT
    key = tl.load(keys + row * count + at, mask=at < count, other=least)
    _best_keys(key, best + row * COUNT, COUNT)
    tl.debug_barrier()
    at = tl.arange(0, PADDED)
    key = tl.load(best + row * COUNT + at, mask=at < COUNT, other=0)
    token = 0xFFFFF - (key & 0xFFFFF)
    bits = (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)) >> 20 << 20
    value = bits.to(tl.float64, bitcast=True)
    name = tl.load(names + token, mask=at < COUNT, other=0)
    line = lines + row * (2 * COUNT + 1)
    tl.store(line + at, name.to(tl.float64), mask=at < COUNT)
    tl.store(line + COUNT + at, value, mask=at < COUNT)
    at = tl.arange(0, CHUNKS)
    top = tl.load(tops + row * num_chunks + at, mask=at < num_chunks, other=float("-inf"))
    weight = tl.load(weights + row * num_chunks + at, mask=at < num_chunks, other=0.0)
    most = tl.max(top, 0)
    total = tl.sum(weight * _exp_below(top, most), 0)
    tl.store(line + 2 * COUNT, most + tl.log(total).to(tl.float64))


@triton.jit
def _exp(x):
    """e^x for x <= 0, as in kernels/simd.h."""
    bounded = tl.where(x > -87.0, x, -87.0)
    shifted = tl.fma(bounded, bounded * 0.0 + 1.44269504, bounded * 0.0 + 12582912.0)
    n = shifted - 12582912.0
    r = tl.fma(n, n * 0.0 - 0.693359375, bounded)
    r = tl.fma(n, n * 0.0 + 2.12194440e-4, r)
    e = r * 0.0 + 1 / 5040
    e = tl.fma(e, r, r * 0.0 + 1 / 720)
    e = tl.fma(e, r, r * 0.0 + 1 / 120)
    e = tl.fma(e, r, r * 0.0 + 1 / 24)
    e = tl.fma(e, r, r * 0.0 + 1 / 6)
    e = tl.fma(e, r, r * 0.0 + 0.5)
    e = tl.fma(e, r, r * 0.0 + 1.0)
    e = tl.fma(e, r, r * 0.0 + 1.0)
    power = (shifted.to(tl.int32, bitcast=True) - 0x4B400000) << 23
    scaled = (e.to(tl.int32, bitcast=True) + power).to(tl.float32, bitcast=True)
    return tl.where(x > -87.0, scaled, 0.0)


@triton.jit
def _number(order):
    """The float32 that comes at this place in the order of floats."""
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _order(number):
    bits = number.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _kept(source, count, least, target, BLOCK: tl.constexpr):
    """Copies the numbers that reach ``least``, in their order; how many."""
    kept = count * 0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < count, other=float("-inf"))
        stays = (x >= least) & (at < count)
        tl.store(target + kept + tl.cumsum(stays.to(tl.int32), 0) - 1, x, mask=stays)
        kept += tl.sum(stays.to(tl.int32), 0)
    tl.debug_barrier()
    return kept


@triton.jit
def _kth_largest(source, count, wanted, low, high, BLOCK: tl.constexpr):
    """The ``wanted``-th largest of some numbers, which is in [low, high]."""
    low, high = _order(low), _order(high)
    while low < high:
        middle = low + (high - low + 1) // 2
        bound, reached = _number(middle), count * 0
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(source + at, mask=at < count, other=float("-inf"))
            reached += tl.sum(((x >= bound) & (at < count)).to(tl.int32), 0)
        is_higher = reached >= wanted
        low, high = tl.where(is_higher, middle, low), tl.where(is_higher, high, middle - 1)
    return _number(low)


@triton.jit
def _weight_from(source, count, base, scale, least, BLOCK: tl.constexpr):
    """The sum of weights that reach ``least``."""
    total = base.to(tl.float64) * 0.0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < count, other=float("-inf"))
        weight = _exp((x - base) * scale)
        total += tl.sum(tl.where(weight >= least, weight, 0.0).to(tl.float64), 0)
    return total


@triton.jit(do_not_specialize=["vocab"])
def _cut_kernel(
    logits, largest, keys, scales, top_ps, min_ps, cuts, spare, more, vocab, BLOCK: tl.constexpr
):
    """The smallest logit that passes a row's filters; see kernels/filter.h."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    top_k = tl.load(keys + 2 * num_rows + row).to(tl.int32)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row).to(tl.float32)
    base, scale = tl.load(largest + row), tl.load(scales + row).to(tl.float32)
    cut, count = tl.full((), float("-inf"), tl.float32), vocab + 0
    spare, more = spare + row.to(tl.int64) * vocab, more + row.to(tl.int64) * vocab
    source = logits + row.to(tl.int64) * vocab
    is_finite = tl.abs(base) < float("inf")
    if is_finite & (top_k > 0) & (top_k < vocab):
        # k lanes have a maximum of at least the k-th largest maximum: it bounds the k-th largest
        # logit from below.
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(source + at, mask=at < vocab, other=float("-inf"))
            most = tl.maximum(most, x)
        floor = cut
        if top_k <= BLOCK:
            tl.store(more + tl.arange(0, BLOCK), most, mask=tl.arange(0, BLOCK) < vocab)
            tl.debug_barrier()
            floor = _kth_largest(more, tl.minimum(vocab, BLOCK), top_k, cut, base, BLOCK)
        count = _kept(source, vocab, floor, spare, BLOCK)
        cut = _kth_largest(spare, count, top_k, floor, base, BLOCK)
        tl.debug_barrier()
        count = _kept(spare, count, cut, more, BLOCK)
        source = more
    if is_finite & ((top_p < 1.0) | (min_p > 0.0)):
        least, total = min_p, _weight_from(source, count, base, scale, 0.0, BLOCK)
        if top_p < 1.0:  # those below are too few in all to complete the nucleus
            few = (0.5 * (1.0 - top_p) * total / count).to(tl.float32)
            bound = tl.maximum(least, few)
            # Nothing with a smaller weight is looked at again; the margin is far above rounding.
            count = _kept(source, count, base + (tl.log(bound) - 0.01) / scale, spare, BLOCK)
            source = spare
            low = bound.to(tl.int32, bitcast=True).to(tl.int64)
            high = low * 0 + 0x3F800000
            while low < high:
                middle = low + (high - low + 1) // 2
                mass = _weight_from(source, count, base, scale, _number(middle), BLOCK)
                is_higher = mass >= top_p * total
                low, high = tl.where(is_higher, middle, low), tl.where(is_higher, high, middle - 1)
            least = _number(low)
        smallest = base
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(source + at, mask=at < count, other=float("inf"))
            reaches = (_exp((x - base) * scale) >= least) & (at < count)
            smallest = tl.minimum(smallest, tl.min(tl.where(reaches, x, float("inf")), 0))
        cut = smallest
    tl.store(cuts + row, cut)


def laws_of(found_CN: Tensor, logits_NV: Tensor, keys: Sequence[DrawKey]) -> list[Law | None]:
    """The laws of these rows with what `drawn` has found for the first ones, in one transfer.

    None where the largest logit is not finite or one is NaN.
    """
    tokens, likeliest, *cuts = found_CN.tolist()
    bits_N = cuts[0] if cuts else repeat(None)
    found = zip(keys, logits_NV.unbind(), tokens, likeliest, bits_N, strict=False)
    return [
        None
        if token < 0
        else Law(
            *(logits_V, key.scale or None, best),
            *(-math.inf if bits is None else float(np.int32(bits).view(np.float32)), token),
        )
        for key, logits_V, token, best, bits in found
    ]


def drawn(logits_NV: Tensor, numbers: Tensor, has_cuts: bool = False) -> Tensor:
    """The winner of each row, the likeliest token and, with filters, bits of the cut: [2 or 3, N].

    Nothing is asked of the device, so this can be recorded.

    Args:
        logits_NV: contiguous float32.
        numbers: of the rows' keys, [6 N] int64: seeds, positions, top_k, and the bits of doubles:
            scales, top_p, min_p.
    """
    largest_N, likeliest_N = logits_NV.max(dim=1)
    keys = _Keys.of(numbers, len(logits_NV))
    cuts_N = _cuts(logits_NV, largest_N, keys) if has_cuts else None
    found_CN = numbers.new_empty((3 if has_cuts else 2, len(logits_NV)))
    _draw(logits_NV, largest_N, likeliest_N, cuts_N, keys, found_CN)
    return found_CN


def drafted(
    logits_NR: Tensor, numbers: Tensor, names_R: Tensor, sums_NR: Tensor, has_cuts: bool = False
) -> Tensor:
    """The winner of each row among some named tokens, [N]; nothing is asked of the device.

    Args:
        logits_NR: contiguous float32.
        numbers: see `drawn`.
        names_R: the tokens, ascending.
        sums_NR: float64; filled with the sums of logits, scaled, and noise: of greedy rows, logits.
    """
    keys, cuts_N = _Keys.of(numbers, len(logits_NR)), None
    largest_N = logits_NR  # it is not looked at
    if has_cuts:
        largest_N = logits_NR.amax(dim=1)
        cuts_N = _cuts(logits_NR, largest_N, keys)
    found_N = names_R.new_empty(len(logits_NR))
    _draw(logits_NR, largest_N, names_R, cuts_N, keys, found_N, names_R, sums_NR)
    return found_N


def listed(sums_NR: Tensor, names_R: Tensor, count: int) -> Tensor:
    """Of each row the ``count`` best tokens, their sums, and the log of the sum of exp of all.

    Nothing is asked of the device. Sums come in 32 bits of fraction.

    Args:
        sums_NR: see `drafted`; R at most 2^20.
        names_R: see `drafted`.

    Returns:
        float64 [N, 2 count + 1].
    """
    num_rows, vocab = sums_NR.shape
    chunks = triton.cdiv(vocab, _LIST)
    keys = names_R.new_empty((num_rows, chunks, count))
    tops_NC = sums_NR.new_empty((num_rows, chunks))
    weights_NC = sums_NR.new_empty((num_rows, chunks), dtype=torch.float32)
    _list_kernel[(num_rows, chunks)](
        *(sums_NR, keys, tops_NC, weights_NC, vocab), COUNT=count, CHUNK=_LIST, num_warps=1
    )
    lines = sums_NR.new_empty((num_rows, 2 * count + 1))
    _line_kernel[(num_rows,)](
        *(keys, tops_NC, weights_NC, names_R, names_R.new_empty((num_rows, count)), lines, chunks),
        COUNT=count,
        CHUNKS=triton.next_power_of_2(chunks),
        LISTED=triton.next_power_of_2(chunks * count),
        PADDED=triton.next_power_of_2(count),
    )
    return lines


class _Keys(NamedTuple):
    """Views of `drawn`'s numbers: seeds, positions and top_k [3 N], and doubles [N] each."""

    wholes: Tensor
    scales: Tensor
    top_ps: Tensor
    min_ps: Tensor

    @classmethod
    def of(cls, numbers: Tensor, num_rows: int) -> _Keys:
        doubles_CN = numbers[3 * num_rows :].view(torch.float64).view(3, num_rows)
        return cls(numbers[: 3 * num_rows], *doubles_CN.unbind())


def _cuts(logits_NV: Tensor, largest_N: Tensor, keys: _Keys) -> Tensor:
    """The smallest logit of each row that passes its filters."""
    cuts_N, vocab = torch.empty_like(largest_N), logits_NV.shape[1]
    _cut_kernel[(len(logits_NV),)](
        *(logits_NV, largest_N, *keys, cuts_N),
        *(torch.empty_like(logits_NV), torch.empty_like(logits_NV), vocab),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
        enable_fp_fusion=False,
        num_warps=16,
    )
    return cuts_N


def _draw(
    logits_NV: Tensor,
    largest_N: Tensor,
    likeliest_N: Tensor,
    cuts_N: Tensor | None,
    keys: _Keys,
    found: Tensor,
    names_V: Tensor | None = None,
    sums_NV: Tensor | None = None,
) -> None:
    """Write the winners to the first N of ``found``; see `drawn` and `drafted`."""
    num_rows, vocab = logits_NV.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    scores_NC = keys.scales.new_empty((num_rows, chunks))
    tokens_NC = torch.empty((num_rows, chunks), dtype=torch.int32, device=found.device)
    cuts = largest_N if cuts_N is None else cuts_N
    names = found if names_V is None else names_V
    sums = scores_NC if sums_NV is None else sums_NV
    _noise_kernel[(num_rows, chunks)](
        *(logits_NV, largest_N, cuts, keys.wholes, keys.scales, names, sums),
        *(scores_NC, tokens_NC, vocab),
        HAS_CUTS=cuts_N is not None,
        HAS_NAMES=names_V is not None,
        KEEPS_SUMS=sums_NV is not None,
        CHUNK=_CHUNK,
        enable_fp_fusion=False,
    )
    _winner_kernel[(num_rows,)](
        *(largest_N, likeliest_N, cuts, names, scores_NC, tokens_NC, found, chunks),
        HAS_CUTS=cuts_N is not None and names_V is None,
        HAS_NAMES=names_V is not None,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
    )


def key_numbers(keys: Sequence[DrawKey]) -> Array:
    """As `drawn` takes them."""
    wholes = [[k.seed for k in keys], [k.position for k in keys], [k.top_k for k in keys]]
    parts = [[k.scale for k in keys], [k.top_p for k in keys], [k.min_p for k in keys]]
    both = np.array(wholes, np.uint64), np.array(parts, np.float64).view(np.uint64)
    return np.concatenate(both).ravel().view(np.int64)
