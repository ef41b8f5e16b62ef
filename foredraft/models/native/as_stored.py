"""Weights of a GGUF file as they come: each format has a packed one that holds the same numbers.

Shape legend: R rows, K inputs, N bytes of a block, B blocks of 32 or 16 inputs, C chunks of 64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.gguf_blocks import Bytes, Kind
from foredraft.models.files.safety import Checkpoint, StoredTensor
from foredraft.models.files.stored import read_blocks
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.packed import (
    CHUNK_INPUTS,
    GROUP_ROWS,
    Blocks,
    Centred4Matrix,
    Centred5Matrix,
    Int4Matrix,
    Int5Matrix,
    Int8Matrix,
    Nested4Matrix,
    Nested5Matrix,
    Nested6Matrix,
    PackedMatrix,
    QuantisedMatrix,
    StackedMatrix,
)
from foredraft.models.native.shelf import Shelf

Numbers = np.ndarray[Any, Any]

FORMS: Mapping[str, type[QuantisedMatrix]] = {
    "Q8_0": Int8Matrix,
    "Q5_0": Centred5Matrix,
    "Q5_1": Int5Matrix,
    "Q4_0": Centred4Matrix,
    "Q4_1": Int4Matrix,
    "Q4_K": Nested4Matrix,
    "Q5_K": Nested5Matrix,
    "Q6_K": Nested6Matrix,
}
"""The packed form of each format of GGUF files."""


def why_not_as_stored(checkpoint: Checkpoint, config: DecoderConfig) -> str | None:
    """Why the weights of a checkpoint cannot be kept as they come; None: they can."""
    names = config.family.names
    for name, tensor in checkpoint.tensors.items():
        is_router = names.router is not None and name.endswith(f".{names.router}.weight")
        if len(tensor.shape) == 2 and not (tensor.is_quantised or is_router):
            return f"{name} is stored as {tensor.dtype}, and only formats of few bits are kept"
    for index in range(config.num_hidden_layers if config.experts else 0):
        parts = [f"model.layers.{index}.{name}.weight".format(expert=0) for name in names.gate_up]
        if len({FORMS[checkpoint.tensors[part].dtype] for part in parts}) > 1:
            return f"the experts of layer {index} have gates and inputs in formats of their own"
    for layer in _attention_formats(checkpoint).values():
        rows = {part: tensor.shape[0] for part, tensor in layer.items()}
        formats = {FORMS[tensor.dtype] for tensor in layer.values()}
        if len(formats) > 1 and any(rows[part] % GROUP_ROWS for part in "qk" if part in rows):
            return (
                f"queries and keys of {rows} rows in formats of their own are kept only in "
                f"multiples of {GROUP_ROWS} rows"
            )
    return None


def _attention_formats(checkpoint: Checkpoint) -> dict[str, dict[str, StoredTensor]]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        prefix, _, part = name.partition(".self_attn.")
        if part in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            found.setdefault(prefix, {})[part[0]] = tensor
    return found


def bytes_as_stored(tensors: Iterable[StoredTensor]) -> int:
    """Of weights in memory; what is not quantised is float32."""
    return int(sum(prod(one.shape) * _bytes_per_weight(one) for one in tensors))


def _bytes_per_weight(tensor: StoredTensor) -> float:
    return FORMS[tensor.dtype].bytes_per_weight if tensor.is_quantised else 4.0


def formats_of(checkpoint: Checkpoint) -> list[str]:
    """The formats of the matrices, the one of most weights first."""
    counts: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if len(tensor.shape) == 2 and tensor.dtype != "F32":
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + prod(tensor.shape)
    return sorted(counts, key=lambda name: -counts[name])


def holds(form: type[PackedMatrix], tensor: StoredTensor) -> bool:
    """Whether a form has the very numbers of a tensor's format."""
    own = FORMS.get(tensor.dtype)
    return own is form or (own is Centred4Matrix and form is Int4Matrix)


def matrix_as_stored(
    tensors: Sequence[StoredTensor],
    num_parts: int,
    shelf: Shelf,
    form: type[QuantisedMatrix] | None = None,
) -> QuantisedMatrix | StackedMatrix:
    """Matrices of as many inputs, one below the other, packed without rounding.

    Args:
        num_parts: see `foredraft.models.native.packed.PackedMatrix.of_weight`.
        form: that `holds` them all; None: each has that of its format.

    Raises:
        ModelLoadError: a scale is no finite number.
    """
    forms = [form or FORMS[tensor.dtype] for tensor in tensors]
    if len(set(forms)) > 1:
        return StackedMatrix(
            tuple(_packed(form, [one], 1, shelf) for form, one in zip(forms, tensors, strict=True))
        )
    return _packed(forms[0], tensors, num_parts, shelf)


def _packed(
    form: type[QuantisedMatrix], tensors: Sequence[StoredTensor], num_parts: int, shelf: Shelf
) -> QuantisedMatrix:
    found = [(tensor, read_blocks(tensor)) for tensor in tensors]

    def rows_of(wanted: slice) -> Blocks:
        """Of all matrices as if they were one."""
        pieces = list[Blocks]()
        first = 0
        for tensor, blocks in found:
            begin, end = max(wanted.start - first, 0), min(wanted.stop - first, len(blocks))
            if begin < end:
                assert tensor.gguf is not None
                pieces.append(unpacked(tensor.gguf.kind, blocks[begin:end], form))
            first += len(blocks)
        rows = Blocks.stacked(pieces)
        if not rows.is_finite():
            raise ModelLoadError(
                f"{tensors[0].file} is damaged: a scale of its {tensors[0].dtype} weights is no "
                "finite number. Download it again"
            )
        return rows

    num_rows = sum(tensor.shape[0] for tensor in tensors)
    return form.of_rows(rows_of, (num_rows, tensors[0].shape[1]), num_parts, shelf)


def unpacked(kind: Kind, blocks_N: Bytes, form: type[QuantisedMatrix]) -> Blocks:
    """Some rows [R, blocks of a row, N] as a form has them that `holds` their format."""
    assert kind.unpack is not None
    with np.errstate(all="ignore"):  # scales are looked at afterwards
        found = kind.unpack(blocks_N)
    integers, scales, minima = found.integers_SK, found.scales_S, found.minima_S
    num_rows, block_inputs = len(blocks_N), integers.shape[-1]
    chunks_of_block = kind.block_weights // CHUNK_INPUTS

    def tensor(numbers: Numbers) -> Tensor:
        return torch.from_numpy(numbers.reshape(num_rows, -1))

    def steps(numbers: Numbers) -> Tensor:
        return tensor(numbers.repeat(chunks_of_block, axis=-1))

    integers = np.ascontiguousarray(integers).view(np.int8)
    rows = Blocks(
        torch.from_numpy(integers.reshape(num_rows, -1, block_inputs)),
        tensor(scales),
        minima_RB=None if minima is None else tensor(minima),
        steps_RC=None if found.step is None else steps(found.step),
        minimum_steps_RC=None if found.minimum_step is None else steps(found.minimum_step),
    )
    return rows.from_minimum() if form is Int4Matrix and rows.minima_RB is None else rows
