"""Weight layouts of the CPU kernel: quantised groups, and AMX tiles for bfloat16.

A weight of few bits is an integer times the scale of the few inputs around it, in some formats plus
a minimum. The formats (``kernels/formats.h``) are those that models come in, so their weights are
kept as they are; other weights are rounded, to nearest, in 8 bits (symmetric around zero) or in 4
(from a minimum on), with a float16 scale for each 32 inputs. Activations have 16 bits. Tiles
(``kernels/tiles.h``) hold bfloat16 weights as they are.

All of them lie in an arena. A forward reads all weights, and huge pages save a tenth of its time
(``kernels/pages.h``). Tensors that are allocated one by one lie scattered between others, and the
system backs only whole ranges of 2 MB with huge pages.

Shape legend: R rows (outputs) of a matrix, K inputs, G groups of 16 rows, B blocks of 32 inputs (16
in one format), C runs of chunks of 64 inputs: four chunks in formats that have steps, else one; D
chunks of a run, S steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.models.files.gguf_blocks import FP4, IQ4

_PIECE_BYTES = 64 << 20
"""The unused part of a chunk costs address space, not memory."""
_HUGE_PAGE = 2 << 20
_LINE = 64


class Shelf:
    """Bump allocator of uninitialised tensors."""

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A uint8 tensor, aligned to a cache line."""
        size = math.prod(shape)
        room = -(-size // _LINE) * _LINE
        if self._free is None or room > len(self._free):
            piece = torch.empty(max(room, _PIECE_BYTES) + _HUGE_PAGE, dtype=torch.uint8)
            self._free = piece[-piece.data_ptr() % _HUGE_PAGE :]
        taken, self._free = self._free[:room], self._free[room:]
        return taken[:size].view(*shape)


GROUP_ROWS = 16
SCALE_INPUTS = 32
"""Inputs that share a scale. Twice as many would make products some 3 % faster, and the error half
as large again (docs/decisions/0002-cpu-kernel.md)."""

CHUNK_INPUTS = 2 * SCALE_INPUTS
STEP_INPUTS = 4 * CHUNK_INPUTS
"""Inputs of a row that share the step of their scales, where scales are whole numbers."""

_QUAD = 4
_TILE_PAIRS = 16
_HALF_BYTE = 4
_LOWER, _LOWEST, _LOWEST_TWO = 0x0F0F0F0F, 0x01010101, 0x03030303
"""Half a byte of each weight of a quad, and fewer bits."""
_ROWS_AT_ONCE = 1024
"""Rows quantised in one go: what this needs besides the result stays small."""


@dataclass(frozen=True)
class Blocks:
    """A matrix of R rows as integers with scales.

    Attributes:
        integers_RBK: int8 [R, B, inputs of a block].
        scales_RB: float16 [R, B]; int8 where they are to be multiplied with steps.
        minima_RB: likewise, what is added to each weight of a block; None: nothing.
        steps_RS: float16 or float32 [R, S] for the scales of each 256 inputs; None: scales are
            numbers themselves.
        minimum_steps_RS: likewise for the minima.
    """

    integers_RBK: Tensor
    scales_RB: Tensor
    minima_RB: Tensor | None = None
    steps_RS: Tensor | None = None
    minimum_steps_RS: Tensor | None = None

    def rows(self, rows: slice) -> Blocks:
        """Some of the rows."""
        return self._each(lambda tensor: tensor[rows])

    def filled_up(self, num_rows: int, num_inputs: int) -> Blocks:
        """With zeros, to the whole groups and runs of a packed piece."""

        def fill(tensor: Tensor) -> Tensor:
            is_step = tensor is self.steps_RS or tensor is self.minimum_steps_RS
            columns = num_inputs // (STEP_INPUTS if is_step else self.integers_RBK.shape[2])
            short = (0, columns - tensor.shape[1], 0, num_rows - len(tensor))
            if not any(short):
                return tensor
            return F.pad(tensor, (0, 0, *short) if tensor.dim() == 3 else short)

        return self._each(fill)

    @classmethod
    def stacked(cls, pieces: Sequence[Blocks]) -> Blocks:
        """Those of matrices in one format, one below the other."""
        if len(pieces) == 1:
            return pieces[0]
        names = [name for name, value in vars(pieces[0]).items() if value is not None]
        return cls(**{name: torch.cat([getattr(one, name) for one in pieces]) for name in names})

    def from_minimum(self) -> Blocks:
        """Integers of 4 bits with a sign as such that begin at 0, with a minimum."""
        return replace(self, integers_RBK=self.integers_RBK + 8, minima_RB=self.scales_RB * -8.0)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return Blocks(**{name: change(tensor) for name, tensor in tensors.items()})

    def dequantised(self) -> Tensor:
        """Float32 [R, K], each product and each sum rounded once."""
        numbers_RBK = self.integers_RBK.float() * self.numbers("scales_RB")[..., None]
        if self.minima_RB is not None:
            numbers_RBK += self.numbers("minima_RB")[..., None]
        return numbers_RBK.flatten(1)

    def numbers(self, field: Literal["scales_RB", "minima_RB"]) -> Tensor:
        """Scales or minima, float32 [R, B], multiplied with their steps where there are any."""
        is_scale = field == "scales_RB"
        found_RB: Tensor = getattr(self, field)
        steps_RS = self.steps_RS if is_scale else self.minimum_steps_RS
        if steps_RS is None:
            return found_RB.float()
        blocks_of_step = STEP_INPUTS // self.integers_RBK.shape[2]
        steps_RB = steps_RS.float().repeat_interleave(blocks_of_step, 1)
        return steps_RB[:, : found_RB.shape[1]] * found_RB.float()

    def is_finite(self) -> bool:
        """Whether scales and minima are numbers."""
        tensors = (tensor for tensor in vars(self).values() if tensor is not None)
        floats = (tensor for tensor in tensors if tensor.is_floating_point())
        return all(bool(torch.isfinite(tensor).all()) for tensor in floats)


Numbers = Sequence[tuple[str, int, torch.dtype]]
"""Fields of `Blocks`, how many numbers of each there are for a row, and what these are."""


@dataclass(frozen=True, eq=False)
class Form:
    """A layout of weights in few bits, in groups of 16 rows (``kernels/groups.h``).

    Each chunk holds its 16 rows' scales and minima, and then its weights. Numbers of scales are as
    [blocks, 16 rows] each. Where they are whole numbers, the steps of scales and minima lie before
    each run of four chunks.

    Attributes:
        bits: of a weight as it is stored.
        code: its ``ForedraftFormat``.
        head: the numbers that a chunk begins with.
        steps: the numbers that a run of chunks begins with.
        is_signed: weights are stored half of their range higher: 128, or 8 of 4 bits.
        codes: sixteen numbers, of which weights are stored as the places.
        formats: of GGUF files and of quantised safetensors, whose numbers it holds.
        rounded: rounds some rows [R, K] to nearest; None: matrices come in this form only.
    """

    name: str
    bits: int
    code: int
    head: Numbers
    steps: Numbers = ()
    is_signed: bool = False
    codes: Sequence[int] = ()
    formats: tuple[str, ...] = ()
    rounded: Callable[[Tensor], Blocks] | None = None

    @property
    def takes_eight(self) -> bool:
        """Whether it is multiplied with activations of 8 bits too, if these are asked for."""
        return not self.codes and (self.bits <= 4 or bool(self.steps))

    @property
    def has_fine_minima(self) -> bool:
        """Whether each 16 inputs have a minimum of their own."""
        return ("minima_RB", 4, torch.int8) in self.head

    @property
    def run_inputs(self) -> int:
        """Inputs of a run of chunks."""
        return STEP_INPUTS if self.steps else CHUNK_INPUTS

    @property
    def bytes_per_weight(self) -> float:
        """Its share of scale and minimum included."""
        chunk_bytes = _size(self.head) + GROUP_ROWS * CHUNK_INPUTS * self.bits // 8
        run_bytes = _size(self.steps) + self.run_inputs // CHUNK_INPUTS * chunk_bytes
        return run_bytes / (GROUP_ROWS * self.run_inputs)

    def of_weight(
        self, weight_RK: Tensor, num_parts: int = 1, shelf: Shelf | None = None
    ) -> PackedMatrix:
        """Bring a matrix into this form, rounded.

        Args:
            weight_RK: float weights, finite.
            num_parts: equally high matrices that lie one below the other in it.
            shelf: where to put it.
        """
        assert self.rounded is not None
        rounded = self.rounded
        return self.of_rows(
            lambda rows: rounded(weight_RK[rows].float()), weight_RK.shape, num_parts, shelf
        )

    def of_blocks(
        self, blocks: Blocks, num_inputs: int, num_parts: int = 1, shelf: Shelf | None = None
    ) -> PackedMatrix:
        """Pack integers and scales that are there already."""
        shape = (len(blocks.integers_RBK), num_inputs)
        return self.of_rows(blocks.rows, shape, num_parts, shelf)

    def of_rows(
        self,
        rows_of: Callable[[slice], Blocks],
        shape: Sequence[int],
        num_parts: int = 1,
        shelf: Shelf | None = None,
    ) -> PackedMatrix:
        """Pack integers and scales, of some rows of ``shape`` [R, K] at a time."""
        return self._of_pieces(
            shape, num_parts, shelf, lambda rows, place: self._put(rows_of(rows), place)
        )

    def _of_pieces(
        self,
        shape: Sequence[int],
        num_parts: int,
        shelf: Shelf | None,
        put: Callable[[slice, Tensor], None],
    ) -> PackedMatrix:
        """Of some rows at a time, which ``put`` writes to their whole groups."""
        num_rows, num_inputs = shape[0] // num_parts, shape[1]
        groups, runs = _num_groups(num_rows), -(-num_inputs // self.run_inputs)
        run_bytes = int(GROUP_ROWS * self.run_inputs * self.bytes_per_weight)
        packed_GCN = (shelf or Shelf()).empty((num_parts * groups, runs, run_bytes))
        for part in range(num_parts):
            for first, rows in _pieces(num_rows):
                start, row = part * groups + first // GROUP_ROWS, part * num_rows + first
                place = packed_GCN[start : start + _num_groups(rows)]
                put(slice(row, row + rows), place)
        return PackedMatrix(self, packed_GCN, (num_rows,) * num_parts, num_inputs)

    def _places(self, packed_GCN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the steps [G, C, 1, bytes], heads and integers [G, C, chunks, bytes]."""
        begin, head = _size(self.steps), _size(self.head)
        chunks = _split(packed_GCN[..., begin:], 2, self.run_inputs // CHUNK_INPUTS, -1)
        return packed_GCN[:, :, None, :begin], chunks[..., :head], chunks[..., head:]

    def _put(self, blocks: Blocks, packed_GCN: Tensor) -> None:
        """Lay out whole groups."""
        groups, runs, _ = packed_GCN.shape
        blocks = blocks.filled_up(groups * GROUP_ROWS, runs * self.run_inputs)
        steps, heads, integers = self._places(packed_GCN)
        _put_numbers(steps, self.steps, blocks)
        _put_numbers(heads, self.head, blocks)
        numbers = blocks.integers_RBK.contiguous().view(torch.uint8)
        if self.codes:
            places = torch.zeros(256, dtype=torch.uint8)
            places[torch.tensor(self.codes) & 255] = torch.arange(16, dtype=torch.uint8)
            numbers = places[numbers.flatten().int()].view(numbers.shape)
        if self.is_signed:
            numbers = numbers + (1 << self.bits - 1)  # as whole numbers without a sign
        num_chunks = runs * heads.shape[2]
        quads = numbers.reshape(groups, GROUP_ROWS, num_chunks, -1).view(torch.int32)
        words = _in_fewer_bits(quads.permute(0, 2, 3, 1), self.bits).flatten(2)
        integers.view(torch.int32).copy_(_split(words, 1, runs, -1))

    def blocks_of(self, packed_GCN: Tensor) -> Blocks:
        """Integers and scales of whole groups, with the rows and inputs that were filled up."""
        steps, heads, integers = self._places(packed_GCN)
        found = _numbers(steps, self.steps) | _numbers(heads, self.head)
        words = _split(integers.flatten(1, 2), 2, -1, GROUP_ROWS * _QUAD)
        quads = _split(_in_bytes(words, self.bits), 3, GROUP_ROWS, _QUAD).permute(0, 3, 1, 2, 4)
        numbers = quads.reshape(*found["scales_RB"].shape, -1)
        if self.is_signed:
            numbers = (numbers.to(torch.int16) - (1 << self.bits - 1)).to(torch.int8)
        if self.codes:
            codes = torch.tensor(self.codes, dtype=torch.int8, device=numbers.device)
            numbers = codes[numbers.long()]
        return Blocks(numbers, **found)

    def unpack(self, packed_GCN: Tensor) -> Tensor:
        """The weights of whole groups, float32 [R, K]."""
        return self.blocks_of(packed_GCN).dequantised()

    def rows(self, packed_GCN: Tensor, indices_R: Tensor) -> Tensor:
        """Some rows of whole groups, float [R, K]."""
        groups_RGK = self.unpack(packed_GCN[indices_R // GROUP_ROWS]).view(
            len(indices_R), GROUP_ROWS, -1
        )
        return groups_RGK[torch.arange(len(indices_R)), indices_R % GROUP_ROWS]


class _Tiles(Form):
    """bfloat16 as it is. Each chunk holds two tiles [16 pairs of inputs, 16 rows, 2 inputs]."""

    def of_weight(
        self, weight_RK: Tensor, num_parts: int = 1, shelf: Shelf | None = None
    ) -> PackedMatrix:
        """Lay out a matrix; bfloat16 weights lose nothing."""

        def put(rows: slice, place_GCN: Tensor) -> None:
            groups, chunks, _ = place_GCN.shape
            short = groups * GROUP_ROWS - (rows.stop - rows.start)
            some_RK = F.pad(
                weight_RK[rows].bfloat16(),
                (0, chunks * CHUNK_INPUTS - weight_RK.shape[1], 0, short),
            ).contiguous()
            pairs = some_RK.view(torch.int32).view(groups, GROUP_ROWS, -1, _TILE_PAIRS)
            _tiles(place_GCN).copy_(pairs.permute(0, 2, 3, 1))

        return self._of_pieces(weight_RK.shape, num_parts, shelf, put)

    def unpack(self, packed_GCN: Tensor) -> Tensor:
        pairs = _tiles(packed_GCN).permute(0, 3, 1, 2).reshape(len(packed_GCN) * GROUP_ROWS, -1)
        return pairs.view(torch.bfloat16).float()

    def rows(self, packed_GCN: Tensor, indices_R: Tensor) -> Tensor:
        pairs = _tiles(packed_GCN)[indices_R // GROUP_ROWS, :, :, indices_R % GROUP_ROWS]
        return pairs.flatten(1).view(torch.bfloat16)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [R, K] in one of the forms.

    Attributes:
        packed_GCN: uint8 [G, C, bytes], laid out as ``form`` says.
        part_rows: rows of the matrices that lie one below the other in it. Each begins with a group
            of its own, filled up with zeros.
        num_inputs: K; the last chunk is filled up with zeros.
    """

    form: Form
    packed_GCN: Tensor
    part_rows: tuple[int, ...]
    num_inputs: int

    @property
    def bits(self) -> int:
        return self.form.bits

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.part_rows), self.num_inputs

    @property
    def parts(self) -> tuple[PackedMatrix, ...]:
        """The matrices that lie one below the other in it; views, nothing is copied."""
        pieces = torch.split(self.packed_GCN, [_num_groups(rows) for rows in self.part_rows])
        return tuple(
            PackedMatrix(self.form, piece, (rows,), self.num_inputs)
            for piece, rows in zip(pieces, self.part_rows, strict=True)
        )

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights [R, K] as numbers, rounded to ``dtype``."""
        parts = [self.form.unpack(part.packed_GCN)[: part.shape[0]] for part in self.parts]
        return torch.cat(parts)[:, : self.num_inputs].to(dtype)

    def rows(self, indices_R: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows [R, K] of a matrix of one part, likewise."""
        rows_RK = self.form.rows(self.packed_GCN, indices_R.to(self.packed_GCN.device))
        return rows_RK[:, : self.num_inputs].to(dtype)

    def in_pieces(self, device: torch.device) -> Iterator[tuple[int, Blocks]]:
        """Some rows at a time, on a device: which is the first, and what they hold.

        Inputs are filled up to the whole runs of the layout.
        """
        start = 0
        for part in self.parts:
            for first, rows in _pieces(part.shape[0]):
                group = first // GROUP_ROWS
                piece = part.packed_GCN[group : group + _num_groups(rows)].to(device)
                yield start + first, self.form.blocks_of(piece).rows(slice(0, rows))
            start += part.shape[0]


def _rounded_to_8(weight_RK: Tensor) -> Blocks:
    blocks_RBK = _in_blocks(weight_RK)
    largest_RB = torch.maximum(blocks_RBK.amax(-1), -blocks_RBK.amin(-1))
    scales_RB = (largest_RB / 127).to(torch.float16)
    # Where a scale was rounded down, the largest weight comes out a little above 127.
    rounded_RBK = (blocks_RBK / _divisors(scales_RB)).round_().clamp_(-127, 127)
    return Blocks(rounded_RBK.to(torch.int8), scales_RB)


def _rounded_to_4(weight_RK: Tensor) -> Blocks:
    blocks_RBK = _in_blocks(weight_RK)
    minima_RB = blocks_RBK.amin(-1).to(torch.float16)
    above_RBK = blocks_RBK - minima_RB.float()[..., None]
    scales_RB = (above_RBK.amax(-1) / 15).to(torch.float16)
    rounded_RBK = (above_RBK / _divisors(scales_RB)).round_().clamp_(0, 15)
    return Blocks(rounded_RBK.to(torch.int8), scales_RB, minima_RB)


def _rounded_to_centred_4(weight_RK: Tensor) -> Blocks:
    blocks_RBK = _in_blocks(weight_RK)
    places_RB1 = blocks_RBK.abs().argmax(-1, keepdim=True)
    # The largest one is -8 scales, so that all of the range is used.
    scales_RB = (blocks_RBK.gather(-1, places_RB1)[..., 0] / -8).to(torch.float16)
    steps_RB1 = torch.where(scales_RB == 0, 1.0, scales_RB.float())[..., None]
    rounded_RBK = (blocks_RBK / steps_RB1).round_().clamp_(-8, 7)
    return Blocks(rounded_RBK.to(torch.int8), scales_RB)


_SCALES: Numbers = (("scales_RB", 2, torch.float16),)
_MINIMA: Numbers = (*_SCALES, ("minima_RB", 2, torch.float16))
_STEP: Numbers = (("steps_RS", 1, torch.float16),)
_STEPS: Numbers = (*_STEP, ("minimum_steps_RS", 1, torch.float16))
_WIDE_STEP: Numbers = (("steps_RS", 1, torch.float32),)
_FACTORS: Numbers = (("scales_RB", 2, torch.int8), ("minima_RB", 2, torch.int8))
_FINE_SCALES: Numbers = (("scales_RB", 4, torch.int8),)
_FINE_FACTORS: Numbers = (*_FINE_SCALES, ("minima_RB", 4, torch.int8))
_IQ2 = (-43, -25, -8, 8, 25, 43, *(0,) * 10)
_IQ3_S = tuple(range(-15, 16, 2))
_IQ3 = (-31, *range(-26, 27, 4), 31)
"""Magnitudes with a sign; those of IQ3_XXS are halved."""

TILES = _Tiles("tiles", 16, 0, ())
INT8 = Form("int8", 8, 0, _SCALES, is_signed=True, formats=("int8", "Q8_0"), rounded=_rounded_to_8)
INT4 = Form("int4", 4, 1, _MINIMA, formats=("MLX 4 bits", "Q4_1"), rounded=_rounded_to_4)
CENTRED4 = Form(
    *("centred4", 4, 6, _SCALES),
    is_signed=True,
    formats=("int4", "Q4_0"),
    rounded=_rounded_to_centred_4,
)
NESTED4 = Form("nested4", 4, 3, _FACTORS, _STEPS, formats=("Q4_K",))
NESTED6 = Form("nested6", 6, 5, _FINE_SCALES, _STEP, True, formats=("Q6_K",))
_IQ2_FORMATS = ("IQ2_S", "IQ2_XS", "IQ2_XXS")

QUANTISED: Sequence[Form] = (
    INT8,
    INT4,
    Form("int5", 5, 2, _MINIMA, formats=("Q5_1",)),
    NESTED4,
    Form("nested5", 5, 4, _FACTORS, _STEPS, formats=("Q5_K",)),
    NESTED6,
    CENTRED4,
    Form("centred5", 5, 7, _SCALES, is_signed=True, formats=("uint4", "Q5_0")),
    Form("nested2", 2, 8, _FINE_FACTORS, _STEPS, formats=("Q2_K", "TQ1_0", "TQ2_0")),
    Form("nested3", 4, 9, _FINE_SCALES, _STEP, True, formats=("Q3_K",)),
    Form("iq4", 4, 10, _SCALES, codes=IQ4, formats=("IQ4_NL",)),
    Form("fp4", 4, 11, _SCALES, codes=FP4, formats=("MXFP4",)),
    Form("nested-iq4", 4, 12, _FINE_SCALES, _WIDE_STEP, codes=IQ4, formats=("IQ4_XS",)),
    Form("nested-iq2", 4, 13, _FINE_SCALES, _WIDE_STEP, codes=_IQ2, formats=_IQ2_FORMATS),
    Form("nested-iq3s", 4, 14, _FINE_SCALES, _WIDE_STEP, codes=_IQ3_S, formats=("IQ3_S",)),
    Form("nested-iq3", 4, 15, _FINE_SCALES, _WIDE_STEP, codes=_IQ3, formats=("IQ3_XXS",)),
)
"""By ``ForedraftFormat``."""

PACKED: Mapping[int, Form] = {16: TILES, 8: INT8, 4: INT4}
"""The forms that weights are brought into, by bits of a weight."""

FORMS: Mapping[str, Form] = {name: form for form in QUANTISED for name in form.formats}
"""The form of each format of GGUF files and of quantised safetensors."""

_BY_NAME = {form.name: form for form in (TILES, *QUANTISED)}

Matrix = Tensor | PackedMatrix
"""Weights [R, K] of a product, as stored."""


@dataclass(frozen=True)
class StackedMatrix:
    """Matrices in formats of their own, one below the other; their inputs are the same."""

    parts: tuple[PackedMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].num_inputs

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights [R, K] as numbers, rounded to ``dtype``."""
        return torch.cat([part.dequantised(dtype) for part in self.parts])


Stack = Matrix | StackedMatrix
"""Matrices that are multiplied together, or one."""


def as_tensor(matrix: Stack, dtype: torch.dtype) -> Tensor:
    """The weights [R, K] in ``dtype``; a matrix that is not quantised already has it."""
    return matrix if isinstance(matrix, Tensor) else matrix.dequantised(dtype)


def rows_of(matrix: Matrix, indices_R: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows [R, K] of embeddings or a head in ``dtype``, which plain ones already have."""
    if isinstance(matrix, PackedMatrix):
        return matrix.rows(indices_R, dtype)
    return F.embedding(indices_R.to(matrix.device), matrix)


def to_tensors(name: str, matrix: Stack) -> dict[str, Tensor]:
    """The tensors that hold the weights, by names that say their layout: see `of_tensors`."""
    if isinstance(matrix, Tensor):
        return {name: matrix}
    if isinstance(matrix, StackedMatrix):
        parts = (to_tensors(f"{name}/{i}", part) for i, part in enumerate(matrix.parts))
        return {key: tensor for part in parts for key, tensor in part.items()}
    rows, *others = matrix.part_rows
    layout = matrix.form.name, rows, 1 + len(others), matrix.num_inputs
    return {":".join(map(str, (name, *layout))): matrix.packed_GCN}


def of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Stack]:
    """The matrices by the names that `to_tensors` was given."""
    found: dict[str, list[Matrix]] = {}
    for key, tensor in tensors.items():
        name, *layout = key.split(":")
        matrix: Matrix = tensor
        if layout:
            rows, num_parts, num_inputs = map(int, layout[1:])
            matrix = PackedMatrix(_BY_NAME[layout[0]], tensor, (rows,) * num_parts, num_inputs)
        found.setdefault(name.partition("/")[0], []).append(matrix)
    return {
        name: parts[0] if len(parts) == 1 else StackedMatrix(tuple(map(_packed, parts)))
        for name, parts in found.items()
    }


def _packed(matrix: Matrix) -> PackedMatrix:
    assert isinstance(matrix, PackedMatrix)
    return matrix


def tensor_of(matrix: Matrix) -> Tensor:
    """The tensor that holds the weights."""
    return matrix.packed_GCN if isinstance(matrix, PackedMatrix) else matrix


def _size(fields: Numbers) -> int:
    """Bytes, in whole cache lines."""
    size = sum(GROUP_ROWS * count * dtype.itemsize for _, count, dtype in fields)
    return -(-size // _LINE) * _LINE


def _pieces(num_rows: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each piece."""
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        yield first, min(_ROWS_AT_ONCE, num_rows - first)


def _in_blocks(weight_RK: Tensor) -> Tensor:
    """Float32 [R, B, 32], the last block filled up with zeros."""
    short = -weight_RK.shape[1] % SCALE_INPUTS
    return F.pad(weight_RK, (0, short)).reshape(len(weight_RK), -1, SCALE_INPUTS)


def _divisors(scales_RB: Tensor) -> Tensor:
    """Float32 [R, B, 1], above 0; a scale of zero means that all weights are zero."""
    return scales_RB.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]


def _put_numbers(place_GCDN: Tensor, fields: Numbers, blocks: Blocks) -> None:
    """Numbers of 16 rows each, as [numbers, rows], to D places of each run."""
    groups, runs, places, _ = place_GCDN.shape
    at = 0
    for field, count, _ in fields:
        found = getattr(blocks, field).view(groups, GROUP_ROWS, runs, places, count)
        by_group = found.permute(0, 2, 3, 4, 1).flatten(3).contiguous().view(torch.uint8)
        place_GCDN[..., at : at + by_group.shape[3]] = by_group
        at += by_group.shape[3]
    place_GCDN[..., at:] = 0


def _numbers(place_GCDN: Tensor, fields: Numbers) -> dict[str, Tensor]:
    """The inverse of `_put_numbers`: tensors by field."""
    found, at = dict[str, Tensor](), 0
    for field, count, dtype in fields:
        end = at + GROUP_ROWS * count * dtype.itemsize
        numbers = _split(place_GCDN[..., at:end].contiguous().view(dtype), 3, count, -1)
        found[field] = numbers.permute(0, 4, 1, 2, 3).flatten(2).flatten(0, 1)
        at = end
    return found


def _in_fewer_bits(quads: Tensor, bits: int) -> Tensor:
    """Quads of bytes, int32 [G, C, quads, 16], as the kernel's words of so many bits."""
    if bits == 8:
        return quads
    if bits in (6, 2):
        fours = _split(quads, 2, -1, 4)
        if bits == 2:
            one, two, three, four = fours.unbind(3)
            return one | two << 2 | three << 4 | four << 6
        threes, fourth = fours[:, :, :, :3].clone(), fours[:, :, :, 3]
        for i in range(3):
            threes[:, :, :, i] |= ((fourth >> 2 * i) & _LOWEST_TWO) << 6
        return threes.flatten(2, 3)
    lower = quads & _LOWER
    pairs = lower[:, :, 0::2] | (lower[:, :, 1::2] << _HALF_BYTE)
    if bits == _HALF_BYTE:
        return pairs
    fifth = _split((quads >> _HALF_BYTE) & _LOWEST, 2, -1, 8)
    tails = fifth[:, :, :, 0].clone()
    for quad in range(1, 8):
        tails |= fifth[:, :, :, quad] << quad
    return torch.cat((_split(pairs, 2, -1, 4), tails[:, :, :, None]), dim=3).flatten(2, 3)


def _split(tensor: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """A view with one dimension as two, of which -1 follows from the other."""
    return tensor.view(*tensor.shape[:dim], outer, inner, *tensor.shape[dim + 1 :])


def _in_bytes(words: Tensor, bits: int) -> Tensor:
    """The inverse of `_in_fewer_bits`: uint8 [G, C, words, bytes] to [G, C, quads, bytes]."""
    if bits == 8:
        return words
    if bits == 6:
        three = _split(words, 2, -1, 3)
        above = three >> 6
        fourth = above[:, :, :, 0] | above[:, :, :, 1] << 2 | above[:, :, :, 2] << 4
        return torch.cat((three & 63, fourth[:, :, :, None]), dim=3).flatten(2, 3)
    if bits == 2:
        return torch.stack([(words >> shift) & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(2, 3)
    tails = None
    if bits > _HALF_BYTE:
        words = _split(words, 2, -1, 5)
        words, tails = words[:, :, :, :4].flatten(2, 3), words[:, :, :, 4]
    quads = torch.stack((words & 15, words >> _HALF_BYTE), dim=3).flatten(2, 3)
    if tails is None:
        return quads
    fifth = torch.stack([(tails >> quad) & 1 for quad in range(8)], dim=3)
    return quads | fifth.flatten(2, 3) << _HALF_BYTE


def _tiles(packed_GCN: Tensor) -> Tensor:
    """A view of pairs of bfloat16 as int32 [G, steps of 32 inputs, 16 pairs, 16 rows]."""
    return packed_GCN.view(torch.int32).view(len(packed_GCN), -1, _TILE_PAIRS, GROUP_ROWS)


def _num_groups(num_rows: int) -> int:
    return -(-num_rows // GROUP_ROWS)
