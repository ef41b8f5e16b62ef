"""Locations of tensors in the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from foredraft.models.files.gguf_blocks import Kind

FLOATS = ("BF16", "F16", "F32", "F64")
"""Types of weights that mean something by themselves. Others need scales."""
# Bits, because some types of the format are narrower than a byte.
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class GgufPlace:
    """Location of a tensor in a GGUF file.

    Attributes:
        start: its first byte.
        heads: of queries and keys, whose rows llama.cpp orders in its own way; 0: others.
        added: constant that was added to the file's numbers, such as 1 to Gemma's norms.
        is_log: the file has negative exponentials of the numbers.
    """

    kind: Kind
    start: int
    heads: int
    added: float = 0.0
    is_log: bool = False


@dataclass(frozen=True)
class PackedPlace:
    """Weights as integers or floats of 8 bits, with scales in tensors beside them.

    Attributes:
        layout: "gptq", "gptq_v2", "awq", "pack", "int8", "fp8", "mlx" or "mxfp4"; see `quantised`.
        parts: the tensors, by the last part of their names.
        bits: of a weight.
        group: inputs that share a scale.
        keeps: whether integers and scales have a form in memory; else numbers are made of them.
    """

    layout: str
    parts: Mapping[str, StoredTensor]
    bits: int
    group: int
    keeps: bool


@dataclass(frozen=True)
class LoraPlace:
    """Matrices of an adapter: ``scale`` times [R, N] times [N, K] is added to one of the model."""

    first_NK: StoredTensor
    second_RN: StoredTensor
    scale: float


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor, and its description in the header of that file.

    Attributes:
        dtype: in the spelling of safetensors, such as "BF16", or of GGUF, such as "Q4_K".
        gguf: None: the file is a safetensors file.
        name: in its file, where that differs.
        packed: of weights that several tensors of safetensors files make.
        lora: what is added to it as it is read.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    gguf: GgufPlace | None = None
    name: str | None = None
    packed: PackedPlace | None = None
    lora: LoraPlace | None = None

    @property
    def files(self) -> set[Path]:
        """All that it is read from."""
        parts = [*self.packed.parts.values()] if self.packed else []
        parts += [self.lora.first_NK, self.lora.second_RN] if self.lora else []
        return {self.file, *(part.file for part in parts)}

    @property
    def is_quantised(self) -> bool:
        """Whether it is stored as integers with scales."""
        if self.lora is not None:
            return False
        if self.packed is not None:
            return self.packed.keeps
        return self.gguf is not None and self.gguf.kind.unpack is not None

    @property
    def is_readable(self) -> bool:
        """Whether there are numbers to be read from it."""
        return self.dtype in FLOATS or self.gguf is not None or self.packed is not None

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in its file."""
        if self.packed is not None:
            return sum(part.num_bytes for part in self.packed.parts.values())
        count = prod(self.shape)
        return self.gguf.kind.num_bytes(count) if self.gguf else count * BITS[self.dtype] // 8
