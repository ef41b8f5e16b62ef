"""Strict reader of GGUF files: their metadata, and the locations of their tensors.

Files may come from anywhere, so nothing in them is trusted. Each count, length and offset is
compared with the bytes that are there before anything is read, and nothing is allocated by a number
that the file merely claims. A file holds numbers and texts only; none of them is ever run.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.gguf_blocks import KINDS, Bytes, Kind

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 64 << 20
"""Several times that of a vocabulary of 260,000 tokens. As Python objects, texts of one letter take
some eight times their size."""
_MAX_ENTRIES = 1 << 16
"""Most metadata entries, and most tensors."""
_MAX_NAME_BYTES = (1 << 16) - 1
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32
_ALIGNMENT_KEY = "general.alignment"

_BOOL, _STRING, _ARRAY = 7, 8, 9
# By their place; what is no number has none.
_NUMBER_TYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1", "", "", "<u8", "<i8", "<f8")
_NUMBERS = {code: np.dtype(name) for code, name in enumerate(_NUMBER_TYPES) if name}
"""Types of metadata, by their number in files."""
_OTHER_KINDS = {9: "Q8_1", 15: "Q8_K", 19: "IQ1_S", 29: "IQ1_M", 40: "NVFP4", 41: "Q1_0"}
_OTHER_KINDS |= {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
"""Names of formats that are not read, for error messages."""


@dataclass(frozen=True)
class GgufTensor:
    """Location of a tensor in its file.

    Attributes:
        shape: outermost dimension first, as torch and numpy have it: [rows, inputs] of a matrix.
        start: its first byte, from the beginning of the file.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return self.kind.num_bytes(prod(self.shape))


class GgufFile:
    """A file whose header was checked against its contents. It reads no weights by itself.

    Args:
        path: of the file. It is mapped, and should not be written to meanwhile.

    Attributes:
        metadata: numbers, truth values, texts, lists of texts, and numpy arrays of numbers.
        tensors: by name, in the order of the file.

    Raises:
        ModelLoadError: it is no GGUF file, is truncated or damaged, or holds tensors in a format
            that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _mapped(path)
        header = _Header(path, self._data)
        num_tensors, num_entries = header.start()
        self.metadata: Mapping[str, Any] = _metadata(header, num_entries)
        tensors = [_tensor(header) for _ in range(num_tensors)]
        self.tensors: Mapping[str, GgufTensor] = _placed(header, tensors, self.metadata)

    def blocks(self, tensor: GgufTensor) -> Bytes:
        """The stored bytes: uint8 [..., blocks of a row, bytes of a block], read only."""
        *rows, inputs = tensor.shape
        data = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        return data.reshape(*rows, inputs // tensor.kind.block_weights, tensor.kind.block_bytes)

    def weights(self, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The numbers of a tensor: float32 of its shape."""
        return tensor.kind.dequantise(self.blocks(tensor)).reshape(tensor.shape)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelLoadError(f"{path} cannot be read as GGUF: {error}") from error


class _EndsEarlyError(ModelLoadError):
    """More bytes should follow than there are."""


def num_header_bytes(path: Path, start: bytes) -> int | None:
    """Length of the header of a file that starts so, which ``path`` names; None: it is longer.

    Raises:
        ModelLoadError: it is damaged.
    """
    header = _Header(path, start)
    try:
        num_tensors, num_entries = header.start()
        _metadata(header, num_entries)
        for _ in range(num_tensors):
            _tensor(header)
    except _EndsEarlyError:
        return None
    return header.position


class _Header:
    """Reads one value after the other; a value that would end beyond the file is refused first."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self._path, self._data = path, data
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self.position = 0
        self.num_file_bytes = len(data)

    def refuse(self, what: str, kind: type[ModelLoadError] = ModelLoadError) -> NoReturn:
        raise kind(
            f"{self._path} is truncated, damaged or no GGUF file: {what} (header, byte "
            f"{self.position}). Download it again"
        )

    def refuse_format(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self._path}: {what}")

    def start(self) -> tuple[int, int]:
        """The numbers of tensors and of metadata entries, after magic and version."""
        if (magic := self._take(len(_MAGIC))) != _MAGIC:
            self.refuse(f"it begins with {magic!r} and not with {_MAGIC!r}")
        version = self.number("<I")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                self.refuse_format("a big-endian GGUF file is not read; get the little-endian one")
            self.refuse_format(
                f"GGUF version {version} is not read, only {' and '.join(map(str, _VERSIONS))}; "
                "convert the model again with a current llama.cpp"
            )
        num_tensors, num_entries = self.number("<Q"), self.number("<Q")
        for count, what in ((num_tensors, "tensors"), (num_entries, "metadata entries")):
            if count > _MAX_ENTRIES:
                self.refuse(f"it claims {count} {what}, and {_MAX_ENTRIES} at most are read")
        return num_tensors, num_entries

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        return int(value)

    def text(self, most_bytes: int = _MAX_HEADER_BYTES) -> str:
        num_bytes = self.number("<Q")
        if num_bytes > most_bytes:
            self.refuse(f"a text of {num_bytes} bytes, where {most_bytes} at most are read")
        try:
            return self._take(num_bytes).decode()
        except UnicodeDecodeError as error:
            self.refuse(f"a text is no UTF-8 ({error.reason})")

    def value(self) -> Any:
        kind = self.number("<I")
        if kind == _ARRAY:
            return self._array()
        return self.text() if kind == _STRING else self._numbers(kind, 1)[0].item()

    def _array(self) -> Any:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            self._check(count * struct.calcsize("<Q"))  # each has its length before it
            return [self.text() for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            self.refuse(f"{kind} is no type of a number or text")
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind != _BOOL:
            return values
        if count and values.max() > 1:
            self.refuse(f"{values.max()} is no truth value")
        return values.astype(bool)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._end - self.position:
            where = "the file" if self._end == self.num_file_bytes else "the largest header read"
            what = f"{num_bytes} bytes should follow, and {where} ends at byte {self._end}"
            self.refuse(what, _EndsEarlyError)

    def _take(self, num_bytes: int) -> bytes:
        self._check(num_bytes)
        first, self.position = self.position, self.position + num_bytes
        return self._data[first : self.position]


def _metadata(header: _Header, num_entries: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(num_entries):
        key = header.text(_MAX_NAME_BYTES)
        if key in found:
            header.refuse(f"metadata {key!r:.80} is there twice")
        found[key] = header.value()
    return found


def _tensor(header: _Header) -> GgufTensor:
    """One entry of the list of tensors; ``start`` counts from the first byte of all tensors."""
    name = header.text(_MAX_NAME_BYTES)
    num_dimensions = header.number("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        header.refuse(f"tensor {name!r:.80} has {num_dimensions} dimensions")
    inner_first = [header.number("<Q") for _ in range(num_dimensions)]
    code, start = header.number("<I"), header.number("<Q")
    kind = KINDS.get(code)
    if kind is None:
        header.refuse_format(
            f"tensor {name!r:.80} is stored as {_OTHER_KINDS.get(code, f'type {code}')}, which is "
            f"not read, only {', '.join(kind.name for kind in KINDS.values())}; get the model in "
            "one of these formats, such as a Q8_0 or Q4_K_M file"
        )
    if 0 in inner_first or inner_first[0] % kind.block_weights:
        header.refuse(
            f"tensor {name!r:.80} of type {kind.name} has the dimensions {inner_first}, and rows "
            f"are made of blocks of {kind.block_weights}"
        )
    return GgufTensor(name, kind, tuple(reversed(inner_first)), start)


def _placed(
    header: _Header, tensors: list[GgufTensor], metadata: Mapping[str, Any]
) -> dict[str, GgufTensor]:
    """The tensors by name, found to lie inside of the file, aligned, and apart from each other."""
    alignment = metadata.get(_ALIGNMENT_KEY, _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        header.refuse(f"{_ALIGNMENT_KEY} is {alignment!r:.80}, and should be a power of two")
    data_start = -(-header.position // alignment) * alignment
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        start, stop = data_start + tensor.start, data_start + tensor.start + tensor.num_bytes
        if tensor.start % alignment or start < end or stop > header.num_file_bytes:
            header.refuse(
                f"tensor {tensor.name!r:.80} should fill bytes {start} to {stop}; the tensor "
                f"before it ends at {end}, the file at {header.num_file_bytes}, and tensors begin "
                f"at multiples of {alignment}"
            )
        end = stop
    found = {
        tensor.name: GgufTensor(tensor.name, tensor.kind, tensor.shape, data_start + tensor.start)
        for tensor in tensors
    }
    if len(found) < len(tensors):
        header.refuse("two tensors have the same name")
    return found
