"""The number formats of GGUF: blocks of integers with scales, and their dequantisation.

Every quantised format comes to the same: a weight is an integer times the scale of the few
weights around it, plus their minimum where the format has one. The formats differ in how the
integers' bits lie in the bytes, and in how scales and minima are stored themselves.

Shape legend: a leading ... is any number of dimensions; N bytes of a block; S parts of a block that
have a scale of their own; K weights of such a part.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Halves = np.ndarray[Any, np.dtype[np.float16]]
Integers = np.ndarray[Any, Any]
"""8-bit integers, with or without a sign."""


@dataclass(frozen=True)
class Quantised:
    """Weights as they are stored.

    Attributes:
        integers_SK: [..., S, K].
        scales_S: float16 [..., S], or float32 of powers of two; integers where they are nested, of
            8 bits.
        minima_S: the same of the minimum, which is added to each weight; None: there is none.
        step: float16 or float32 [..., 1], factor of nested scales.
        minimum_step: float16 [..., 1], factor of nested minima.
    """

    integers_SK: Integers
    scales_S: Halves | Floats | Integers
    minima_S: Halves | Integers | None = None
    step: Halves | Floats | None = None
    minimum_step: Halves | None = None

    def dequantised(self) -> Floats:
        """Float32 [..., S * K]: each product and each sum rounded once."""
        scales_S = _product(self.scales_S, self.step)
        weights_SK: Floats = scales_S[..., None] * self.integers_SK.astype(np.float32)
        if self.minima_S is not None:
            weights_SK += _product(self.minima_S, self.minimum_step)[..., None]
        return weights_SK.reshape(*weights_SK.shape[:-2], -1)


@dataclass(frozen=True)
class Kind:
    """A format of tensors.

    Attributes:
        block_weights: how many weights a block has. A row has whole blocks.
        block_bytes: size of a block.
        unpack: uint8 [..., N] to `Quantised`; None of formats that hold the numbers themselves.
        numbers: uint8 [..., N] to float32 [..., 1]; None of quantised formats.
    """

    name: str
    block_weights: int
    block_bytes: int
    unpack: Callable[[Bytes], Quantised] | None = None
    numbers: Callable[[Bytes], Floats] | None = None

    def num_bytes(self, num_weights: int) -> int:
        """Size of ``num_weights`` weights, in whole blocks."""
        return num_weights // self.block_weights * self.block_bytes

    def dequantise(self, blocks_N: Bytes) -> Floats:
        """Float32 [..., block_weights] of the bytes of blocks [..., N].

        Scales that are infinite or NaN give such weights; the loader checks for them.
        """
        if self.unpack is None:
            assert self.numbers is not None
            return self.numbers(np.ascontiguousarray(blocks_N))
        with np.errstate(all="ignore"):
            return self.unpack(blocks_N).dequantised()


def _product(numbers_S: Halves | Floats | Integers, step: Halves | Floats | None) -> Floats:
    """Float32 [..., S]; exact, as integers have 8 bits."""
    floats_S = numbers_S.astype(np.float32)
    return floats_S if step is None else step.astype(np.float32) * floats_S


def _halves(blocks_N: Bytes) -> Halves:
    """Float16 numbers."""
    return np.ascontiguousarray(blocks_N).view("<f2")


def _nibbles(bytes_N: Bytes, run: int) -> Integers:
    """Half bytes: of each ``run`` bytes all lower halves, then all upper ones."""
    runs = bytes_N.reshape(*bytes_N.shape[:-1], -1, 1, run)
    both = runs >> np.array([[0], [4]], np.uint8) & 15
    return both.reshape(*bytes_N.shape[:-1], -1)


def _bits(bytes_N: Bytes) -> Integers:
    """All bits, the lowest of each byte first."""
    return np.unpackbits(bytes_N, axis=-1, bitorder="little")


def _fields(numbers: Integers, *shifts: int) -> Integers:
    """Of each of the last dimension's numbers what lies so many bits up, as a dimension behind."""
    found: Integers = numbers[..., None] >> np.array(shifts, numbers.dtype)
    return found


def _pairs_of_bits(bytes_N: Bytes) -> Integers:
    """Quarters of bytes: of each 32 bytes all lowest ones, then those above."""
    runs = bytes_N.reshape(*bytes_N.shape[:-1], -1, 32)
    found: Integers = np.moveaxis(_fields(runs, 0, 2, 4, 6) & 3, -1, -2)
    return found.reshape(*bytes_N.shape[:-1], -1)


# ------------------------------------------------------------------- blocks of 32, with one scale


def _q4_0(blocks_N: Bytes) -> Quantised:
    integers_K = _nibbles(blocks_N[..., 2:], 16).view(np.int8) - np.int8(8)
    return Quantised(integers_K[..., None, :], _halves(blocks_N[..., :2]))


def _q4_1(blocks_N: Bytes) -> Quantised:
    scale, minimum = _halves(blocks_N[..., :2]), _halves(blocks_N[..., 2:4])
    return Quantised(_nibbles(blocks_N[..., 4:], 16)[..., None, :], scale, minimum)


def _q5_0(blocks_N: Bytes) -> Quantised:
    integers_K = _five_bits(blocks_N[..., 2:]).view(np.int8) - np.int8(16)
    return Quantised(integers_K[..., None, :], _halves(blocks_N[..., :2]))


def _q5_1(blocks_N: Bytes) -> Quantised:
    scale, minimum = _halves(blocks_N[..., :2]), _halves(blocks_N[..., 2:4])
    return Quantised(_five_bits(blocks_N[..., 4:])[..., None, :], scale, minimum)


def _five_bits(bytes_N: Bytes) -> Integers:
    """Each integer's fifth bit in 4 bytes, then the others."""
    integers: Integers = _nibbles(bytes_N[..., 4:], 16) | _bits(bytes_N[..., :4]) << 4
    return integers


def _q8_0(blocks_N: Bytes) -> Quantised:
    integers_K = np.ascontiguousarray(blocks_N[..., 2:]).view(np.int8)
    return Quantised(integers_K[..., None, :], _halves(blocks_N[..., :2]))


# ------------------------------------------------ blocks of 256, with scales that have scales again


def _q4_k(blocks_N: Bytes) -> Quantised:
    integers = _nibbles(blocks_N[..., 16:], 32)
    return _with_nested_scales(blocks_N, integers)


def _q5_k(blocks_N: Bytes) -> Quantised:
    upper = _bits(blocks_N[..., 16:48, None]).swapaxes(-1, -2)  # bit s of a byte: of part s
    integers = _nibbles(blocks_N[..., 48:], 32) | upper.reshape(*upper.shape[:-2], -1) << 4
    return _with_nested_scales(blocks_N, integers)


def _with_nested_scales(blocks_N: Bytes, integers: Integers) -> Quantised:
    """Eight parts. A block begins with the scale of its scales and that of its minima (float16);
    12 bytes hold eight scales and eight minima of 6 bits. Minima are subtracted.
    """
    first, second, third = (blocks_N[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return Quantised(
        integers.reshape(*integers.shape[:-1], 8, 32),
        scales.view(np.int8),
        minima.view(np.int8),
        _halves(blocks_N[..., :2]),
        -_halves(blocks_N[..., 2:4]),
    )


def _q6_k(blocks_N: Bytes) -> Quantised:
    """Sixteen parts. Of each half of a block, 64 bytes hold the lower 4 bits and 32 the upper 2."""
    outer = blocks_N.shape[:-1]
    lower = _nibbles(blocks_N[..., :128], 64)
    fours = blocks_N[..., 128:192].reshape(*outer, 2, 1, 32)
    upper = fours >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    integers = (lower | upper.reshape(*outer, -1) << 4).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks_N[..., 192:208]).view(np.int8)
    step = _halves(blocks_N[..., 208:])
    return Quantised(integers.reshape(*outer, 16, 16), scales, step=step)


def _q2_k(blocks_N: Bytes) -> Quantised:
    """Sixteen parts, whose scales and minima have half a byte each. Minima are subtracted."""
    both = blocks_N[..., :16]
    scales, minima = (both & 15).view(np.int8), (both >> 4).view(np.int8)
    step, minimum_step = _halves(blocks_N[..., 80:82]), -_halves(blocks_N[..., 82:])
    integers = _in_sixteens(_pairs_of_bits(blocks_N[..., 16:80]))
    return Quantised(integers, scales, minima, step, minimum_step)


def _q3_k(blocks_N: Bytes) -> Quantised:
    """Sixteen parts, scales of 6 bits. Each integer's third bit comes first; it is taken off."""
    third = _fields(blocks_N[..., :32], *range(8)).swapaxes(-1, -2) & 1
    lower = _pairs_of_bits(blocks_N[..., 32:96])
    integers = (lower | third.reshape(lower.shape) << 2).view(np.int8) - np.int8(4)
    upper = np.moveaxis(_fields(blocks_N[..., 104:108], 0, 2, 4, 6) & 3, -1, -2)
    scales = _nibbles(blocks_N[..., 96:104], 8) | upper.reshape(*upper.shape[:-2], 16) << 4
    step = _halves(blocks_N[..., 108:])
    return Quantised(_in_sixteens(integers), scales.view(np.int8) - np.int8(32), step=step)


def _in_sixteens(integers: Integers) -> Integers:
    found: Integers = integers.reshape(*integers.shape[:-1], -1, 16)
    return found


# -------------------------------------------------------------- three values, with a scale for 256


def _tq1_0(blocks_N: Bytes) -> Quantised:
    """Five digits to the base of 3 in a byte, as fractions of 256; four in the last ones."""

    def digits(start: int, end: int, count: int) -> Integers:
        powers = np.array([[1], [3], [9], [27], [81]], np.uint8)[:count]
        fractions = (blocks_N[..., None, start:end] * powers).astype(np.uint16)
        return (fractions * 3 >> 8).astype(np.uint8).reshape(*blocks_N.shape[:-1], -1)

    parts = digits(0, 32, 5), digits(32, 48, 5), digits(48, 52, 4)
    return _ternary(np.concatenate(parts, axis=-1), blocks_N)


def _tq2_0(blocks_N: Bytes) -> Quantised:
    return _ternary(_pairs_of_bits(blocks_N[..., :64]), blocks_N)


def _ternary(integers: Integers, blocks_N: Bytes) -> Quantised:
    """One less than the integers, as a minimum."""
    step = _halves(blocks_N[..., -2:])
    ones = np.ones((*integers.shape[:-1], 16), np.int8)
    return Quantised(_in_sixteens(integers), ones, ones, step, -step)


# ------------------------------------------------------------------ places in lists of 16 numbers

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Floats of 1, 2 and 1 bits (sign, exponent, fraction), doubled."""


def _listed(codes: tuple[int, ...], places: Integers) -> Integers:
    found: Integers = np.array(codes, np.int8)[places]
    return found


def _iq4_nl(blocks_N: Bytes) -> Quantised:
    integers = _listed(IQ4, _nibbles(blocks_N[..., 2:], 16))
    return Quantised(integers[..., None, :], _halves(blocks_N[..., :2]))


def _mxfp4(blocks_N: Bytes) -> Quantised:
    """The scale is a power of two; half of it, as the list is doubled."""
    integers = _listed(FP4, _nibbles(blocks_N[..., 1:], 16))
    scales = np.ldexp(np.float32(1), blocks_N[..., :1].astype(np.int32) - 128)
    return Quantised(integers[..., None, :], scales.astype(np.float32))


def _iq4_xs(blocks_N: Bytes) -> Quantised:
    """Eight parts, with scales of 6 bits."""
    upper = _fields(_halves(blocks_N[..., 2:4]).view("<u2")[..., 0], *range(0, 16, 2)) & 3
    lower = _fields(blocks_N[..., 4:8], 0, 4) & 15
    scales = lower.reshape(upper.shape) | upper.astype(np.uint8) << 4
    integers = _listed(IQ4, _nibbles(blocks_N[..., 8:], 16))
    return _in_grid(integers, scales.view(np.int8) - np.int8(32), _halves(blocks_N[..., :2]), 1.0)


# -------------------------------------------- groups of weights from a list of groups, with signs


def _iq2_xxs(blocks_N: Bytes) -> Quantised:
    words = _words(blocks_N[..., 2:], "<u4").reshape(*blocks_N.shape[:-1], 8, 2)
    groups = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    scales = 2 * (words[..., 1] >> 28) + 1
    return _signed("IQ2_XXS", blocks_N, groups, _seven_signs(words[..., 1]), scales, 1 / 8)


def _iq2_xs(blocks_N: Bytes) -> Quantised:
    words = _words(blocks_N[..., 2:66], "<u2")
    signs = _with_eighth(words >> 9)
    return _signed("IQ2_XS", blocks_N, words & 511, signs, _odd(blocks_N[..., 66:]), 1 / 8)


def _iq2_s(blocks_N: Bytes) -> Quantised:
    upper = _fields(blocks_N[..., 66:74], 0, 2, 4, 6).astype(np.uint16) & 3
    groups = blocks_N[..., 2:34] | upper.reshape(*upper.shape[:-2], -1) << 8
    signs, scales = blocks_N[..., 34:66], _odd(blocks_N[..., 74:])
    return _signed("IQ2_S", blocks_N, groups, signs, scales, 1 / 8)


def _iq3_xxs(blocks_N: Bytes) -> Quantised:
    words = _words(blocks_N[..., 66:], "<u4")
    scales = 2 * (words >> 28) + 1
    return _signed("IQ3_XXS", blocks_N, blocks_N[..., 2:66], _seven_signs(words), scales, 1 / 2)


def _iq3_s(blocks_N: Bytes) -> Quantised:
    groups = blocks_N[..., 2:66] | _bits(blocks_N[..., 66:74]).astype(np.uint16) << 8
    signs, scales = blocks_N[..., 74:106], _odd(blocks_N[..., 106:])
    return _signed("IQ3_S", blocks_N, groups, signs, scales, 1.0)


def _words(bytes_N: Bytes, kind: str) -> Integers:
    return np.ascontiguousarray(bytes_N).view(kind)


def _odd(bytes_N: Bytes) -> Integers:
    """Half bytes as odd numbers, the lower ones first."""
    found: Integers = 2 * (_fields(bytes_N, 0, 4) & 15) + 1
    return found.reshape(*bytes_N.shape[:-1], -1)


def _with_eighth(signs: Integers) -> Integers:
    """Seven signs, and the one that makes the number of minus signs even."""
    parity = signs ^ signs >> 4
    parity = parity ^ parity >> 2
    found: Integers = (signs & 127 | ((parity ^ parity >> 1) & 1) << 7).astype(np.uint8)
    return found


def _seven_signs(words: Integers) -> Integers:
    signs = _with_eighth(_fields(words, 0, 7, 14, 21) & 127)
    return signs.reshape(*words.shape[:-1], -1)


def _signed(
    name: str, blocks_N: Bytes, groups: Integers, signs: Integers, scales: Integers, unit: float
) -> Quantised:
    """Magnitudes of a list, a bit of ``signs`` each, with scales of equal parts of a block."""
    magnitudes = _grid(name)[groups].reshape(*groups.shape[:-1], -1)
    integers = np.where(_bits(signs), -magnitudes, magnitudes)
    return _in_grid(integers, scales.astype(np.int8), _halves(blocks_N[..., :2]), unit)


@cache
def _grid(name: str) -> Integers:
    """Magnitudes [groups, weights of a group], listed in a file beside this one."""
    for line in Path(__file__).with_name("gguf_grids.txt").read_text("ascii").splitlines():
        if line.startswith(f"{name} "):
            _, size, listed, places = line.split()
            magnitudes = np.array([*map(int, listed.split(","))], np.int8)
            bits = 2 if len(magnitudes) < 4 else 4
            packed = np.frombuffer(base64.b85decode(places), np.uint8)
            found: Integers = magnitudes[_fields(packed, *range(0, 8, bits)) & 2**bits - 1]
            return found.reshape(-1, int(size))
    raise KeyError(name)


def _in_grid(integers: Integers, scales: Integers, step: Halves, unit: float) -> Quantised:
    """Sixteen parts, of which some may share a scale."""
    scales_S = np.repeat(scales, 16 // scales.shape[-1], axis=-1)
    return Quantised(
        _in_sixteens(integers), scales_S, step=step.astype(np.float32) * np.float32(unit)
    )


# ---------------------------------------------------------------------------------- plain numbers


def _float32(blocks_N: Bytes) -> Floats:
    return blocks_N.view("<f4")


def _float16(blocks_N: Bytes) -> Floats:
    return _halves(blocks_N).astype(np.float32)


def _bfloat16(blocks_N: Bytes) -> Floats:
    return (blocks_N.view("<u2").astype(np.uint32) << 16).view(np.float32)


KINDS = {
    0: Kind("F32", 1, 4, numbers=_float32),
    1: Kind("F16", 1, 2, numbers=_float16),
    30: Kind("BF16", 1, 2, numbers=_bfloat16),
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    6: Kind("Q5_0", 32, 22, _q5_0),
    7: Kind("Q5_1", 32, 24, _q5_1),
    8: Kind("Q8_0", 32, 34, _q8_0),
    12: Kind("Q4_K", 256, 144, _q4_k),
    13: Kind("Q5_K", 256, 176, _q5_k),
    14: Kind("Q6_K", 256, 210, _q6_k),
    10: Kind("Q2_K", 256, 84, _q2_k),
    11: Kind("Q3_K", 256, 110, _q3_k),
    20: Kind("IQ4_NL", 32, 18, _iq4_nl),
    23: Kind("IQ4_XS", 256, 136, _iq4_xs),
    39: Kind("MXFP4", 32, 17, _mxfp4),
    34: Kind("TQ1_0", 256, 54, _tq1_0),
    35: Kind("TQ2_0", 256, 66, _tq2_0),
    21: Kind("IQ3_S", 256, 110, _iq3_s),
    18: Kind("IQ3_XXS", 256, 98, _iq3_xxs),
    22: Kind("IQ2_S", 256, 82, _iq2_s),
    17: Kind("IQ2_XS", 256, 74, _iq2_xs),
    16: Kind("IQ2_XXS", 256, 66, _iq2_xxs),
}
"""The formats that are read, by their number in files."""

BY_NAME = {kind.name: kind for kind in KINDS.values()}
