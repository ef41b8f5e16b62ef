"""Weights as int8: a bfloat16 scale for each block of 32 inputs of each output row.

Rounding is symmetric and to nearest; no calibration text is needed. The packed form is laid out
for ``kernels/int8.h``, which multiplies it with int16 activations.

Shape legend: R rows (outputs) of a matrix, K inputs, G groups of 16 rows, B blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_ROWS = 16
SCALE_INPUTS = 32
"""Inputs that share a scale. Twice as many would make products some 3 % faster, and the error half
as large again (docs/decisions/0016-int8-weights.md)."""

BYTES_PER_WEIGHT = (SCALE_INPUTS + 2) / SCALE_INPUTS
"""Its share of the scale included."""

_SCALE_BYTES = GROUP_ROWS * 2
_BLOCK_BYTES = _SCALE_BYTES + GROUP_ROWS * SCALE_INPUTS
_ROWS_AT_ONCE = 1024
"""Rows quantised in one go: what this needs besides the result stays small."""


@dataclass(frozen=True)
class Int8Matrix:
    """A matrix [R, K], packed.

    Attributes:
        packed_GBN: int8 [G, B, bytes]. Each block holds its 16 rows' scales (bfloat16) and then
            their weights as [16 pairs of inputs, 16 rows, 2 inputs].
        part_rows: rows of the matrices that lie one below the other in it. Each begins with a group
            of its own, filled up with zeros.
        num_inputs: K; the last block is filled up with zeros.
    """

    packed_GBN: Tensor
    part_rows: tuple[int, ...]
    num_inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.part_rows), self.num_inputs

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights [R, K] as numbers: the scales times the integers, rounded to ``dtype``."""
        parts = torch.split(self.packed_GBN, [_num_groups(rows) for rows in self.part_rows])
        rows = zip(parts, self.part_rows, strict=True)
        return torch.cat([_unpack(part)[:num_rows] for part, num_rows in rows])[
            :, : self.num_inputs
        ].to(dtype)

    def rows(self, indices_R: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows [R, K] of a matrix of one part, likewise."""
        indices_R = indices_R.to(self.packed_GBN.device)
        groups_RGK = _unpack(self.packed_GBN[indices_R // GROUP_ROWS]).view(
            len(indices_R), GROUP_ROWS, -1
        )
        rows_RK = groups_RGK[torch.arange(len(indices_R)), indices_R % GROUP_ROWS]
        return rows_RK[:, : self.num_inputs].to(dtype)


Matrix = Tensor | Int8Matrix
"""Weights [R, K] of a product, as stored."""


def as_tensor(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The weights [R, K] in ``dtype``; a matrix that is not quantised already has it."""
    return matrix.dequantised(dtype) if isinstance(matrix, Int8Matrix) else matrix


def tensor_of(matrix: Matrix) -> Tensor:
    """The tensor that holds the weights."""
    return matrix.packed_GBN if isinstance(matrix, Int8Matrix) else matrix


def quantise(weight_RK: Tensor, num_parts: int = 1) -> Int8Matrix:
    """Round a matrix to int8.

    Args:
        weight_RK: float weights, finite.
        num_parts: equally high matrices that lie one below the other in it.
    """
    num_rows, num_inputs = weight_RK.shape[0] // num_parts, weight_RK.shape[1]
    groups, blocks = _num_groups(num_rows), -(-num_inputs // SCALE_INPUTS)
    packed_GBN = torch.empty((num_parts * groups, blocks, _BLOCK_BYTES), dtype=torch.int8)
    for part, part_RK in enumerate(torch.split(weight_RK, num_rows)):
        for first, rows in _pieces(num_rows):
            piece = part_RK[first : first + rows]
            start = part * groups + first // GROUP_ROWS
            _pack(piece, packed_GBN[start : start + _num_groups(rows)])
    return Int8Matrix(packed_GBN, (num_rows,) * num_parts, num_inputs)


def _pieces(num_rows: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each piece."""
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        yield first, min(_ROWS_AT_ONCE, num_rows - first)


def _pack(weight_RK: Tensor, packed_GBN: Tensor) -> None:
    """Quantise some rows into their groups."""
    groups, blocks, _ = packed_GBN.shape
    short = (groups * GROUP_ROWS - weight_RK.shape[0], blocks * SCALE_INPUTS - weight_RK.shape[1])
    if any(short):
        weight_RK = F.pad(weight_RK, (0, short[1], 0, short[0]))
    blocks_RBK = weight_RK.float().view(groups * GROUP_ROWS, blocks, SCALE_INPUTS)
    largest_RB = torch.maximum(blocks_RBK.amax(-1), -blocks_RBK.amin(-1))
    scales_RB = (largest_RB / 127).to(torch.bfloat16)
    steps_RB = scales_RB.float().clamp_min(torch.finfo(torch.float32).tiny)
    # Where bfloat16 rounded a scale down, the largest weight comes out a little above 127.
    rounded_RBK = (blocks_RBK / steps_RB[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    by_group = scales_RB.view(groups, GROUP_ROWS, blocks).transpose(1, 2).contiguous()
    packed_GBN[..., :_SCALE_BYTES] = by_group.view(torch.int8)
    pairs = rounded_RBK.view(torch.int16).view(groups, GROUP_ROWS, blocks, SCALE_INPUTS // 2)
    by_pair = pairs.permute(0, 2, 3, 1).reshape(groups, blocks, -1)
    packed_GBN[..., _SCALE_BYTES:].view(torch.int16).copy_(by_pair)


def _unpack(packed_GBN: Tensor) -> Tensor:
    """All rows and inputs of a part, those filled up included; float32 [R, K]."""
    groups, blocks, _ = packed_GBN.shape
    scales_GBR = packed_GBN[..., :_SCALE_BYTES].contiguous().view(torch.bfloat16).float()
    weights = packed_GBN[..., _SCALE_BYTES:].reshape(groups, blocks, -1, GROUP_ROWS, 2)
    weights_GRBK = weights.permute(0, 3, 1, 2, 4).reshape(groups, GROUP_ROWS, blocks, -1)
    numbers = weights_GRBK.float() * scales_GBR.transpose(1, 2)[..., None]
    return numbers.reshape(groups * GROUP_ROWS, blocks * SCALE_INPUTS)


def _num_groups(num_rows: int) -> int:
    return -(-num_rows // GROUP_ROWS)
