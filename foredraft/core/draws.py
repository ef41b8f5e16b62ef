"""The compiled half of drawing: a key in, a token out. All ctypes of the core are here.

Each function does what its namesake in `foredraft.core.noise`, `sampling` or `named` says, and
returns None where kernels/noise.cpp could not be built: callers then take numpy, which gives the
same bits in more time.

Shape legend: N rows of logits, V vocabulary, R named tokens, M some tokens.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foredraft.kernels.build import KernelUnavailable, load_library

Array: TypeAlias = npt.NDArray[Any]
Scored: TypeAlias = list[tuple[int, float]]
"""Tokens with their scores, best first."""
Key: TypeAlias = tuple[int, int, float]
"""Seed and position of the noise, scale of the logits: a `foredraft.core.choices.DrawKey` without
filters."""


class DrawRow(ctypes.Structure):
    """``ForedraftDraw`` of kernels/draw.h."""

    _fields_ = (
        ("row", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("scale", ctypes.c_double),
        ("token", ctypes.c_int64),
        ("best", ctypes.c_int64),
        ("logit", ctypes.c_double),
        ("chance", ctypes.c_double),
    )


class NoiseRow(ctypes.Structure):
    """``ForedraftNoiseRow`` of kernels/noise.cpp."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("scale", ctypes.c_double),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled half, built at the first draw; None if it cannot be built."""
    try:
        found = load_library("noise")
    except KernelUnavailable:
        return None
    pointer, integer, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    number = ctypes.c_double
    named = [pointer, *[integer] * 2, *[pointer] * 2, integer, *[pointer] * 4, integer]
    signatures = {
        "gumbel_top": ([pointer, *[integer] * 3, pointer, integer, *[pointer] * 3], integer),
        "gumbel_top_named": ([*named, *[pointer] * 3], integer),
        "gumbel_argmax": ([pointer, *[integer] * 2, word, word, number, number], integer),
        "gumbel_noise": ([pointer, integer, word, word, pointer], None),
        "filter": ([pointer, *[integer] * 2, *[number] * 3, pointer], integer),
        "draw_rows": ([pointer, *[integer] * 3, pointer], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(found, f"foredraft_{name}")
        function.argtypes, function.restype = arguments, result
    return found


def drawn_rows(logits_NV: Array, keys: Sequence[tuple[int, Key]]) -> ctypes.Array[DrawRow] | None:
    """`foredraft.core.sampling.draw_rows` of contiguous logits."""
    found = library()
    if found is None or not logits_NV.flags.c_contiguous:
        return None
    rows, is_double = draw_array(keys), logits_NV.dtype == np.float64
    found.foredraft_draw_rows(
        *(logits_NV.ctypes.data, is_double, logits_NV.shape[1], len(keys), rows)
    )
    return rows


def draw_array(keys: Sequence[tuple[int, Key]]) -> ctypes.Array[DrawRow]:
    """Draws for compiled code to fill in."""
    return (DrawRow * len(keys))(*[DrawRow(row, *key) for row, key in keys])


def argmax(
    logits: int, is_double: bool, size: int, seed: int, position: int, scale: float, cut: float
) -> int | None:
    """`gumbel_argmax` of logits at an address; -1 where the largest one is not finite."""
    found = library()
    if found is None:
        return None
    token: int = found.foredraft_gumbel_argmax(
        *(logits, is_double, size, seed, position, scale, cut)
    )
    return token


def filter_cut(
    logits: int, size: int, top_k: int, top_p: float, min_p: float, scale: float
) -> tuple[int, float] | None:
    """The likeliest token of float32 logits at an address, and the least logit that passes."""
    found, cut = library(), ctypes.c_double()
    if found is None:
        return None
    token = found.foredraft_filter(logits, size, top_k, top_p, min_p, scale, ctypes.byref(cut))
    return None if token < 0 else (token, cut.value)


def noise_of(tokens: Sequence[int], seed: int, position: int) -> list[float] | None:
    """`gumbel_noise`."""
    found, count = library(), len(tokens)
    if found is None:
        return None
    noise_M = (ctypes.c_double * count)()
    found.foredraft_gumbel_noise((ctypes.c_int64 * count)(*tokens), count, seed, position, noise_M)
    return noise_M[:]


def top_rows(logits_NV: Array, count: int, keys: Sequence[Key]) -> tuple[list[Scored], int] | None:
    """`gumbel_top_rows`, and the number of rows before the first that is not finite."""
    found, (num_rows, vocab) = library(), logits_NV.shape
    if found is None:
        return None
    top, is_double = _TopArrays(num_rows, min(count, vocab)), logits_NV.dtype == np.float64
    noise = (NoiseRow * num_rows)(*keys)
    done = found.foredraft_gumbel_top(
        *(logits_NV.ctypes.data, is_double, num_rows, vocab, noise, *top.arguments)
    )
    return top.scored(), done


def top_named(
    logits_NR: Array,
    lows_R: Array,
    starts: Array,
    others: Sequence[Sequence[tuple[int, float]]],
    count: int,
    keys: Sequence[Key],
) -> tuple[list[Scored], int] | None:
    """`top_rows` of logits over named tokens and a few others (see `NamedLaws`)."""
    found, (num_rows, num_named) = library(), logits_NR.shape
    if found is None:
        return None
    pairs = [pair for each in others for pair in each]
    top = _TopArrays(num_rows, count)
    done = found.foredraft_gumbel_top_named(
        *(logits_NR.ctypes.data, num_rows, num_named, lows_R.ctypes.data),
        *(starts.ctypes.data, len(starts) - 1),
        (ctypes.c_int64 * num_rows)(*accumulate(map(len, others))),
        (ctypes.c_int64 * len(pairs))(*[token for token, _ in pairs]),
        (ctypes.c_double * len(pairs))(*[logit for _, logit in pairs]),
        *((NoiseRow * num_rows)(*keys), *top.arguments),
    )
    return top.scored(), done


class _TopArrays:
    """Output arrays: the best tokens of rows."""

    def __init__(self, num_rows: int, count: int) -> None:
        self._count = count
        self._tokens = (ctypes.c_int64 * (num_rows * count))()
        self._scores = (ctypes.c_double * (num_rows * count))()
        self._found = (ctypes.c_int64 * num_rows)()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of the functions that fill them in."""
        return self._count, self._tokens, self._scores, self._found

    def scored(self) -> list[Scored]:
        starts = range(0, len(self._tokens), self._count)
        return [
            list(zip(self._tokens[i : i + n], self._scores[i : i + n], strict=True))
            for i, n in zip(starts, self._found, strict=True)
        ]
