"""Weights in the layouts that the fused kernel multiplies fastest: in 8 and 4 bits, and on tiles.

In 8 and 4 bits there is a float16 scale for each block of 32 inputs of each output row. Rounding is
to nearest; no calibration text is needed. 8 bits are symmetric around zero, 4 bits start from a
minimum of the block. They are laid out for ``kernels/int8.h``, which multiplies them with
activations of 16 bits. Tiles (``kernels/tiles.h``) hold bfloat16 weights as they are.

Shape legend: R rows (outputs) of a matrix, K inputs, G groups of 16 rows, B blocks of 32 inputs,
C chunks of 2 blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.models.native.shelf import Shelf

GROUP_ROWS = 16
SCALE_INPUTS = 32
"""Inputs that share a scale. Twice as many would make products some 3 % faster, and the error half
as large again (docs/decisions/0002-cpu-kernel.md)."""

_CHUNK_INPUTS = 2 * SCALE_INPUTS
_QUAD = 4
_TILE_PAIRS = 16
_ZERO = 128  # what weight 0 of 8 bits is stored as
_SCALES_BYTES = 2 * GROUP_ROWS * 2
_ROWS_AT_ONCE = 1024
"""Rows quantised in one go: what this needs besides the result stays small."""


@dataclass(frozen=True)
class Blocks:
    """A matrix of R rows as integers with scales.

    Attributes:
        integers_RBK: int8 [R, B, 32]: -127 to 127 of 8 bits, 0 to 15 of 4.
        scales_RB: float16 [R, B].
        minima_RB: float16 [R, B], what is added to each weight of a block; None: nothing.
    """

    integers_RBK: Tensor
    scales_RB: Tensor
    minima_RB: Tensor | None = None

    def rows(self, rows: slice) -> Blocks:
        """Some of the rows."""
        minima_RB = self.minima_RB
        return Blocks(
            self.integers_RBK[rows],
            self.scales_RB[rows],
            None if minima_RB is None else minima_RB[rows],
        )

    def filled_up(self, packed_GCN: Tensor) -> Blocks:
        """With zeros, to the whole groups and chunks of a packed piece."""
        groups, chunks, _ = packed_GCN.shape
        rows = groups * GROUP_ROWS - len(self.integers_RBK)
        blocks = 2 * chunks - self.integers_RBK.shape[1]
        minima_RB = self.minima_RB
        return Blocks(
            F.pad(self.integers_RBK, (0, 0, 0, blocks, 0, rows)),
            F.pad(self.scales_RB, (0, blocks, 0, rows)),
            None if minima_RB is None else F.pad(minima_RB, (0, blocks, 0, rows)),
        )

    def dequantised(self) -> Tensor:
        """Float32 [R, B * 32]."""
        numbers_RBK = self.integers_RBK.float() * self.scales_RB.float()[..., None]
        if self.minima_RB is not None:
            numbers_RBK += self.minima_RB.float()[..., None]
        return numbers_RBK.flatten(1)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [R, K] in groups of rows (``kernels/groups.h``).

    Attributes:
        packed_GCN: uint8 [G, C, bytes], laid out as the subclass says.
        part_rows: rows of the matrices that lie one below the other in it. Each begins with a group
            of its own, filled up with zeros.
        num_inputs: K; the last chunk is filled up with zeros.
    """

    bits: ClassVar[int]
    bytes_per_weight: ClassVar[float]
    """Its share of scale and minimum included."""

    packed_GCN: Tensor
    part_rows: tuple[int, ...]
    num_inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.part_rows), self.num_inputs

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights [R, K] as numbers, rounded to ``dtype``."""
        parts = torch.split(self.packed_GCN, [_num_groups(rows) for rows in self.part_rows])
        rows = zip(parts, self.part_rows, strict=True)
        return torch.cat([self._unpack(part)[:num_rows] for part, num_rows in rows])[
            :, : self.num_inputs
        ].to(dtype)

    def rows(self, indices_R: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows [R, K] of a matrix of one part, likewise."""
        indices_R = indices_R.to(self.packed_GCN.device)
        groups_RGK = self._unpack(self.packed_GCN[indices_R // GROUP_ROWS]).view(
            len(indices_R), GROUP_ROWS, -1
        )
        rows_RK = groups_RGK[torch.arange(len(indices_R)), indices_R % GROUP_ROWS]
        return rows_RK[:, : self.num_inputs].to(dtype)

    @classmethod
    def of_weight(cls, weight_RK: Tensor, num_parts: int = 1, shelf: Shelf | None = None) -> Self:
        """Bring a matrix into this form; what is lost is said by the subclass.

        Args:
            weight_RK: float weights, finite.
            num_parts: equally high matrices that lie one below the other in it.
            shelf: where to put it.
        """
        raise NotImplementedError

    @classmethod
    def _of_pieces(
        cls,
        shape: Sequence[int],
        num_parts: int,
        shelf: Shelf | None,
        put: Callable[[slice, Tensor], None],
    ) -> Self:
        """Of some rows at a time, which ``put`` writes to their whole groups."""
        num_rows, num_inputs = shape[0] // num_parts, shape[1]
        groups, chunks = _num_groups(num_rows), -(-num_inputs // _CHUNK_INPUTS)
        chunk_bytes = int(GROUP_ROWS * _CHUNK_INPUTS * cls.bytes_per_weight)
        packed_GCN = (shelf or Shelf()).empty((num_parts * groups, chunks, chunk_bytes))
        for part in range(num_parts):
            for first, rows in _pieces(num_rows):
                start, row = part * groups + first // GROUP_ROWS, part * num_rows + first
                place = packed_GCN[start : start + _num_groups(rows)]
                put(slice(row, row + rows), place)
        return cls(packed_GCN, (num_rows,) * num_parts, num_inputs)

    @staticmethod
    def _unpack(packed_GCN: Tensor) -> Tensor:
        """All rows and inputs of a part, those filled up included; float32 [R, K]."""
        raise NotImplementedError


class QuantisedMatrix(PackedMatrix):
    """Integers with scales."""

    @classmethod
    def of_weight(cls, weight_RK: Tensor, num_parts: int = 1, shelf: Shelf | None = None) -> Self:
        """Round a matrix."""
        return cls._of_pieces(
            weight_RK.shape,
            num_parts,
            shelf,
            lambda rows, place: cls._put(cls._blocks(weight_RK[rows].float()), place),
        )

    @classmethod
    def of_blocks(
        cls, blocks: Blocks, num_inputs: int, num_parts: int = 1, shelf: Shelf | None = None
    ) -> Self:
        """Pack integers and scales that are there already."""
        shape = (len(blocks.integers_RBK), num_inputs)
        return cls._of_pieces(
            shape, num_parts, shelf, lambda rows, place: cls._put(blocks.rows(rows), place)
        )

    @classmethod
    def _put(cls, blocks: Blocks, packed_GCN: Tensor) -> None:
        cls._pack(blocks.filled_up(packed_GCN), packed_GCN)

    @staticmethod
    def _blocks(weight_RK: Tensor) -> Blocks:
        """Round some rows."""
        raise NotImplementedError

    @staticmethod
    def _pack(blocks: Blocks, packed_GCN: Tensor) -> None:
        """Lay out whole groups."""
        raise NotImplementedError


class Int8Matrix(QuantisedMatrix):
    """8 bits. Each chunk holds its 16 rows' scales (float16) as [2 blocks, 16 rows] and then their
    weights + 128 as [16 quads of inputs, 16 rows, 4 inputs].
    """

    bits = 8
    bytes_per_weight = (SCALE_INPUTS + 2) / SCALE_INPUTS

    @staticmethod
    def _blocks(weight_RK: Tensor) -> Blocks:
        blocks_RBK = _in_blocks(weight_RK)
        largest_RB = torch.maximum(blocks_RBK.amax(-1), -blocks_RBK.amin(-1))
        scales_RB = (largest_RB / 127).to(torch.float16)
        # Where a scale was rounded down, the largest weight comes out a little above 127.
        rounded_RBK = (blocks_RBK / _steps(scales_RB)).round_().clamp_(-127, 127)
        return Blocks(rounded_RBK.to(torch.int8), scales_RB)

    @staticmethod
    def _pack(blocks: Blocks, packed_GCN: Tensor) -> None:
        _put_scales(blocks.scales_RB, packed_GCN[..., :_SCALES_BYTES])
        stored_RBK = (blocks.integers_RBK.to(torch.int16) + _ZERO).to(torch.uint8)
        packed_GCN[..., _SCALES_BYTES:].copy_(_by_quad(stored_RBK, packed_GCN).flatten(2))

    @staticmethod
    def _unpack(packed_GCN: Tensor) -> Tensor:
        scales = _scales(packed_GCN[..., :_SCALES_BYTES])
        numbers = _from_quads(packed_GCN[..., _SCALES_BYTES:]).float() - _ZERO
        return (numbers * scales).reshape(len(packed_GCN) * GROUP_ROWS, -1)


class Int4Matrix(QuantisedMatrix):
    """4 bits. Each chunk holds its 16 rows' scales and then their minima (both float16) as [2
    blocks, 16 rows], and then pairs of quads as [8 pairs, 16 rows, 4 bytes], the first quad of a
    pair in the lower half of the bytes.
    """

    bits = 4
    bytes_per_weight = (SCALE_INPUTS / 2 + 4) / SCALE_INPUTS

    @staticmethod
    def _blocks(weight_RK: Tensor) -> Blocks:
        blocks_RBK = _in_blocks(weight_RK)
        minima_RB = blocks_RBK.amin(-1).to(torch.float16)
        above_RBK = blocks_RBK - minima_RB.float()[..., None]
        scales_RB = (above_RBK.amax(-1) / 15).to(torch.float16)
        rounded_RBK = (above_RBK / _steps(scales_RB)).round_().clamp_(0, 15)
        return Blocks(rounded_RBK.to(torch.int8), scales_RB, minima_RB)

    @staticmethod
    def _pack(blocks: Blocks, packed_GCN: Tensor) -> None:
        assert blocks.minima_RB is not None
        _put_scales(blocks.scales_RB, packed_GCN[..., :_SCALES_BYTES])
        _put_scales(blocks.minima_RB, packed_GCN[..., _SCALES_BYTES : 2 * _SCALES_BYTES])
        quads = _by_quad(blocks.integers_RBK.to(torch.uint8), packed_GCN)
        both = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
        packed_GCN[..., 2 * _SCALES_BYTES :].copy_(both.flatten(2))

    @staticmethod
    def _unpack(packed_GCN: Tensor) -> Tensor:
        scales = _scales(packed_GCN[..., :_SCALES_BYTES])
        minima = _scales(packed_GCN[..., _SCALES_BYTES : 2 * _SCALES_BYTES])
        both = packed_GCN[..., 2 * _SCALES_BYTES :]
        both = both.reshape(*both.shape[:2], -1, GROUP_ROWS * _QUAD)
        quads = torch.stack((both & 15, both >> 4), dim=3).flatten(2)
        numbers = _from_quads(quads).float() * scales + minima
        return numbers.reshape(len(packed_GCN) * GROUP_ROWS, -1)


class TiledMatrix(PackedMatrix):
    """bfloat16 as it is. Each chunk holds two tiles [16 pairs of inputs, 16 rows, 2 inputs]."""

    bits = 16
    bytes_per_weight = 2.0

    @classmethod
    def of_weight(cls, weight_RK: Tensor, num_parts: int = 1, shelf: Shelf | None = None) -> Self:
        """Lay out a matrix; bfloat16 weights lose nothing."""

        def put(rows: slice, place_GCN: Tensor) -> None:
            groups, chunks, _ = place_GCN.shape
            short = groups * GROUP_ROWS - (rows.stop - rows.start)
            some_RK = F.pad(
                weight_RK[rows].bfloat16(),
                (0, chunks * _CHUNK_INPUTS - weight_RK.shape[1], 0, short),
            ).contiguous()
            pairs = some_RK.view(torch.int32).view(groups, GROUP_ROWS, -1, _TILE_PAIRS)
            _tiles(place_GCN).copy_(pairs.permute(0, 2, 3, 1))

        return cls._of_pieces(weight_RK.shape, num_parts, shelf, put)

    def rows(self, indices_R: Tensor, dtype: torch.dtype) -> Tensor:
        indices_R = indices_R.to(self.packed_GCN.device)
        tiles = _tiles(self.packed_GCN)
        pairs = tiles[indices_R // GROUP_ROWS, :, :, indices_R % GROUP_ROWS]
        return pairs.flatten(1).view(torch.bfloat16)[:, : self.num_inputs].to(dtype)

    @staticmethod
    def _unpack(packed_GCN: Tensor) -> Tensor:
        pairs = _tiles(packed_GCN).permute(0, 3, 1, 2).reshape(len(packed_GCN) * GROUP_ROWS, -1)
        return pairs.view(torch.bfloat16).float()


PACKED: Mapping[int, type[PackedMatrix]] = {16: TiledMatrix, 8: Int8Matrix, 4: Int4Matrix}
"""By bits of a weight."""

Matrix = Tensor | PackedMatrix
"""Weights [R, K] of a product, as stored."""


def as_tensor(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The weights [R, K] in ``dtype``; a matrix that is not quantised already has it."""
    return matrix.dequantised(dtype) if isinstance(matrix, PackedMatrix) else matrix


def tensor_of(matrix: Matrix) -> Tensor:
    """The tensor that holds the weights."""
    return matrix.packed_GCN if isinstance(matrix, PackedMatrix) else matrix


def _pieces(num_rows: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each piece."""
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        yield first, min(_ROWS_AT_ONCE, num_rows - first)


def _in_blocks(weight_RK: Tensor) -> Tensor:
    """Float32 [R, B, 32], the last block filled up with zeros."""
    short = -weight_RK.shape[1] % SCALE_INPUTS
    return F.pad(weight_RK, (0, short)).reshape(len(weight_RK), -1, SCALE_INPUTS)


def _steps(scales_RB: Tensor) -> Tensor:
    """What to divide by; a scale of zero means that all weights are zero."""
    return scales_RB.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]


def _put_scales(scales_RB: Tensor, place_GCN: Tensor) -> None:
    groups, chunks, _ = place_GCN.shape
    by_group = scales_RB.view(groups, GROUP_ROWS, chunks, 2).permute(0, 2, 3, 1)
    place_GCN.view(torch.float16).copy_(by_group.reshape(groups, chunks, -1))


def _scales(place_GCN: Tensor) -> Tensor:
    """Float32 [G, 16 rows, C, 2 blocks, 1]."""
    scales = place_GCN.view(torch.float16).float()
    scales = scales.reshape(*scales.shape[:2], 2, GROUP_ROWS)
    return scales.permute(0, 3, 1, 2)[..., None]


def _by_quad(integers_RBK: Tensor, packed_GCN: Tensor) -> Tensor:
    """[G, C, 16 quads, 16 rows, 4 inputs]"""
    groups, chunks, _ = packed_GCN.shape
    quads = integers_RBK.reshape(groups, GROUP_ROWS, chunks, -1, _QUAD)
    return quads.permute(0, 2, 3, 1, 4)


def _from_quads(quads_GCN: Tensor) -> Tensor:
    """[G, 16 rows, C, 2 blocks, 32 inputs]"""
    groups, chunks, _ = quads_GCN.shape
    quads = quads_GCN.reshape(groups, chunks, -1, GROUP_ROWS, _QUAD).permute(0, 3, 1, 2, 4)
    return quads.reshape(groups, GROUP_ROWS, chunks, 2, SCALE_INPUTS)


def _tiles(packed_GCN: Tensor) -> Tensor:
    """A view of pairs of bfloat16 as int32 [G, steps of 32 inputs, 16 pairs, 16 rows]."""
    return packed_GCN.view(torch.int32).view(len(packed_GCN), -1, _TILE_PAIRS, GROUP_ROWS)


def _num_groups(num_rows: int) -> int:
    return -(-num_rows // GROUP_ROWS)
