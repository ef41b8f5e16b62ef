"""The next token of many rows at once, where their laws are nothing but scaled logits.

The same tokens as `foredraft.core.noise.gumbel_argmax` draws for each alone, without passes over
the logits for what a law would say of itself.

Shape legend: N rows of logits, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from foredraft.core.noise import Array, NoiseRow, compiled


class Draw(NamedTuple):
    """What one row of logits gives: the token drawn, the likeliest one, and its logit."""

    token: int
    best: int
    logit: float


class Wanted(NamedTuple):
    """A row to draw for.

    Attributes:
        row: which of the N.
        seed, position: of its noise.
        scale: of the logits; 0 draws the likeliest token.
    """

    row: int
    seed: int
    position: int
    scale: float


def draw_rows(logits_NV: Tensor | Array, wanted: Sequence[Wanted]) -> list[Draw | None]:
    """A draw for each.

    Args:
        logits_NV: contiguous float32 or float64 on CPU.

    Returns:
        None where the largest logit is not finite or one is NaN, and for all that have a scale
        without the compiled half: there is nothing to be gained without it.
    """
    logits_NV = logits_NV.detach().numpy() if isinstance(logits_NV, Tensor) else logits_NV
    found: list[Draw | None] = [None] * len(wanted)
    drawn = []
    for i, row in enumerate(wanted):
        if row.scale == 0.0:
            found[i] = _likeliest(logits_NV[row.row])
        else:
            drawn.append(i)
    if drawn:
        for i, draw in zip(drawn, _drawn(logits_NV, [wanted[i] for i in drawn]), strict=True):
            found[i] = draw
    return found


def _likeliest(logits_V: Array) -> Draw | None:
    token = int(logits_V.argmax())  # of a NaN, if there is one
    logit = float(logits_V[token])
    return Draw(token, token, logit) if math.isfinite(logit) else None


def _drawn(logits_NV: Array, wanted: Sequence[Wanted]) -> list[Draw | None]:
    library, count = compiled(), len(wanted)
    if library is None or not logits_NV.flags.c_contiguous:
        return [None] * count
    rows = (ctypes.c_int64 * count)(*(row.row for row in wanted))
    keys = (NoiseRow * count)(*[NoiseRow(*row[1:]) for row in wanted])
    tokens, best = (ctypes.c_int64 * count)(), (ctypes.c_int64 * count)()
    logits = (ctypes.c_double * count)()
    library.foredraft_draw_rows(
        *(logits_NV.ctypes.data, logits_NV.dtype == np.float64, logits_NV.shape[1]),
        *(count, rows, keys, tokens, best, logits),
    )
    found = zip(tokens, best, logits, strict=True)
    return [Draw(token, b, logit) if token >= 0 else None for token, b, logit in found]
