"""The number formats of GGUF: blocks of integers with scales, and their dequantisation.

Every quantised format comes to the same: a weight is an integer times the scale of the few
weights around it, plus their minimum where the format has one. The formats differ in how the
integers' bits lie in the bytes, and in how scales and minima are stored themselves.

Shape legend: a leading ... is any number of dimensions; N bytes of a block; S parts of a block that
have a scale of their own; K weights of such a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
        scales_S: float16 [..., S]; integers where they are nested, of 8 bits.
        minima_S: the same of the minimum, which is added to each weight; None: there is none.
        step: float16 [..., 1], factor of nested scales.
        minimum_step: float16 [..., 1], factor of nested minima.
    """

    integers_SK: Integers
    scales_S: Halves | Integers
    minima_S: Halves | Integers | None = None
    step: Halves | None = None
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


def _product(numbers_S: Halves | Integers, step: Halves | None) -> Floats:
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
}
"""The formats that are read, by their number in files."""

BY_NAME = {kind.name: kind for kind in KINDS.values()}
