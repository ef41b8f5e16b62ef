"""K-quants, which the format's own package reads and does not write: plainly rounded.

llama.cpp searches for better scales. Here they are only valid ones: for files that tests and
comparisons are made with.

Shape legend: a leading ... is any number of dimensions; S parts of a block, K weights of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]


def _blocks(values: Numbers, parts: int) -> Numbers:
    """[..., blocks of a row, S, K]."""
    return values.reshape(*values.shape[:-1], -1, parts, 256 // parts).astype(np.float32)


def _halves(numbers: Numbers) -> Numbers:
    """The bytes of float16 numbers [...], as [..., 2]."""
    return numbers.astype("<f2")[..., None].view(np.uint8)


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)


def _nibbles(integers: Numbers, run: int) -> Numbers:
    """Two half bytes each: of 2 ``run`` integers the first half are the lower ones."""
    runs = integers.reshape(*integers.shape[:-1], -1, 2, run)
    both = runs[..., 0, :] | runs[..., 1, :] << 4
    found: Numbers = both.reshape(*integers.shape[:-1], -1).astype(np.uint8)
    return found


def _with_minima(values: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """The head of a block (steps, and scales and minima of 6 bits), and integers to ``most``."""
    values_SK = _blocks(values, 8)
    low_S = -np.minimum(values_SK.min(-1), 0)
    scales_S = (values_SK.max(-1) + low_S) / most
    steps = [(one.max(-1) / 63).astype("<f2").astype(np.float32) for one in (scales_S, low_S)]
    numbers = [
        np.clip(np.rint(_ratio(one, np.broadcast_to(step[..., None], one.shape))), 0, 63)
        for one, step in zip((scales_S, low_S), steps, strict=True)
    ]
    unit_S, minimum_S = (n * s[..., None] for n, s in zip(numbers, steps, strict=True))
    above_SK = values_SK + minimum_S[..., None]
    integers_SK = np.rint(_ratio(above_SK, np.broadcast_to(unit_S[..., None], above_SK.shape)))
    scales, minima = (one.astype(np.uint8) for one in numbers)
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = minima[..., :4] | minima[..., 4:] >> 4 << 6
    third = scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4
    head = np.concatenate((*map(_halves, steps), first, second, third), axis=-1)
    return head, np.clip(integers_SK, 0, most).astype(np.uint8)


def _q4_k(values: Numbers) -> Numbers:
    head, integers_SK = _with_minima(values, 15)
    return _rows(head, _nibbles(_flat(integers_SK), 32))


def _q5_k(values: Numbers) -> Numbers:
    head, integers_SK = _with_minima(values, 31)
    upper = np.packbits(integers_SK >> 4, axis=-2, bitorder="little")[..., 0, :]
    return _rows(head, upper, _nibbles(_flat(integers_SK & 15), 32))


def _q6_k(values: Numbers) -> Numbers:
    values_SK = _blocks(values, 16)
    scales_S = np.abs(values_SK).max(-1) / 31
    step = (scales_S.max(-1) / 127).astype("<f2").astype(np.float32)
    wide = np.broadcast_to(step[..., None], scales_S.shape)
    numbers_S = np.rint(_ratio(scales_S, wide)).clip(0, 127)
    unit_SK = np.broadcast_to((numbers_S * step[..., None])[..., None], values_SK.shape)
    integers_SK = np.rint(_ratio(values_SK, unit_SK)).clip(-32, 31).astype(np.int8) + 32
    integers = _flat(integers_SK).astype(np.uint8)
    fours = (integers >> 4).reshape(*integers.shape[:-1], 2, 4, 32)
    upper = fours[..., 0, :] | fours[..., 1, :] << 2 | fours[..., 2, :] << 4 | fours[..., 3, :] << 6
    scales = numbers_S.astype(np.int8).view(np.uint8)
    return _rows(_nibbles(integers & 15, 64), _flat(upper), scales, _halves(step))


def _flat(numbers: Numbers) -> Numbers:
    return numbers.reshape(*numbers.shape[:-2], -1)


def _rows(*parts: Numbers) -> Numbers:
    """The bytes of rows [..., bytes]."""
    return _flat(np.concatenate(parts, axis=-1))


NESTED: Mapping[str, Callable[[Numbers], Numbers]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
"""Float32 [..., K] to stored rows, uint8 [..., bytes]; K is a multiple of 256."""
