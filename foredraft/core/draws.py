"""The next token of many rows at once, where their laws are nothing but scaled logits.

The tokens equal those of `foredraft.core.noise.gumbel_argmax` for each row alone. No passes over
the logits are made to build laws.

Shape legend: N rows of logits, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from foredraft.core.noise import Array, compiled


class Draw(NamedTuple):
    """Result for one row of logits: the token drawn, the likeliest one, and its logit."""

    token: int
    best: int
    logit: float


class DrawKey(NamedTuple):
    """Key of a draw: it fixes the token for given logits.

    Attributes:
        seed, position: of the noise.
        scale: of the logits; 0 draws the likeliest token.
    """

    seed: int
    position: int
    scale: float


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
    )


class Wanted(NamedTuple):
    """A row to draw from: which of the N, and as in `DrawKey`."""

    row: int
    seed: int
    position: int
    scale: float


class DrawRows:
    """Draws as compiled code makes them, in place.

    Attributes:
        rows: to be filled in.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.rows = (DrawRow * len(wanted))(*[DrawRow(*one) for one in wanted])

    def found(self) -> list[Draw | None]:
        """See `found_draws`."""
        return found_draws(self.rows)


def found_draws(rows: Iterable[DrawRow]) -> list[Draw | None]:
    """None where the largest logit is not finite or one is NaN."""
    return [Draw(row.token, row.best, row.logit) if row.token >= 0 else None for row in rows]


def draw_rows(logits_NV: Tensor | Array, wanted: Sequence[Wanted]) -> list[Draw | None]:
    """A draw for each.

    Args:
        logits_NV: contiguous float32 or float64 on CPU.

    Returns:
        As `DrawRows.found`; None also for all that have a scale without the compiled half: there is
        nothing to be gained without it.
    """
    logits_NV = logits_NV.detach().numpy() if isinstance(logits_NV, Tensor) else logits_NV
    library = compiled()
    if library is None or not logits_NV.flags.c_contiguous:
        return [None if one.scale else _likeliest(logits_NV[one.row]) for one in wanted]
    draws = DrawRows(wanted)
    library.foredraft_draw_rows(
        *(logits_NV.ctypes.data, logits_NV.dtype == np.float64, logits_NV.shape[1]),
        *(len(wanted), draws.rows),
    )
    return draws.found()


def _likeliest(logits_V: Array) -> Draw | None:
    token = int(logits_V.argmax())  # of a NaN, if there is one
    logit = float(logits_V[token])
    return Draw(token, token, logit) if math.isfinite(logit) else None
