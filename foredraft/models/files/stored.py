"""Tensors of a checkpoint, read from safetensors or GGUF files.

Shape legend: R rows, K inputs of a row, N bytes of a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.gguf_blocks import Bytes, Kind
from foredraft.models.files.quantised import PackedReader
from foredraft.models.files.tensors import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

_ROWS_AT_ONCE = 4096
"""Rows dequantised at once, which bounds the memory needed besides the result."""


def read_tensor(stored: StoredTensor, name: str) -> Tensor:
    """A whole tensor in the type it is stored in; float32 where that is quantised or added to.

    Raises:
        ModelLoadError: the file is damaged.
    """
    if stored.lora is not None:
        own = (read_tensor(one, name) for one in (stored.lora.second_RN, stored.lora.first_NK))
        second_RN, first_NK = (tensor.float() for tensor in own)
        plain = read_tensor(replace(stored, lora=None), name).float()
        return plain.addmm_(second_RN, first_NK, alpha=stored.lora.scale)
    if stored.packed is not None:
        return packed_reader(stored).dequantised(slice(0, stored.shape[0]))
    if stored.gguf is None:
        return _from_safetensors(stored, stored.name or name)
    import torch

    blocks = read_blocks(stored)
    kind, whole = stored.gguf.kind, torch.empty(stored.shape, dtype=_dtype(stored.gguf.kind))
    for first in range(0, len(whole), _ROWS_AT_ONCE):
        some = kind.dequantise(blocks[first : first + _ROWS_AT_ONCE])
        rows = whole[first : first + _ROWS_AT_ONCE]
        rows.copy_(torch.from_numpy(np.array(some)).view(rows.shape))
    if stored.gguf.is_log:
        return (-whole.float()).log()
    return whole - stored.gguf.added if stored.gguf.added else whole


def read_rows(stored: StoredTensor, name: str, indices_R: Tensor) -> Tensor:
    """Some rows [R, K] of a matrix; see `read_tensor`.

    Raises:
        ModelLoadError: the file is damaged.
    """
    import torch

    if stored.lora is not None or stored.packed is not None:
        return read_tensor(stored, name)[indices_R]
    if stored.gguf is None:
        from safetensors import safe_open

        with safe_open(str(stored.file), framework="pt") as file:
            rows = file.get_slice(stored.name or name)
            return torch.cat([rows[i : i + 1] for i in indices_R.tolist()])
    numbers = stored.gguf.kind.dequantise(read_blocks(stored)[indices_R.numpy()])
    found = torch.from_numpy(numbers.reshape(len(indices_R), -1))
    return found.to(_dtype(stored.gguf.kind))


def packed_reader(stored: StoredTensor) -> PackedReader:
    """The tensors of a packed weight, read.

    Raises:
        ModelLoadError: a file is damaged, or lacks one of them.
    """
    place = stored.packed
    assert place is not None
    parts = {key: _from_safetensors(part, part.name or key) for key, part in place.parts.items()}
    try:
        reader = PackedReader(place, parts, stored.shape[-1])
        reader.dequantised(slice(0, 1))
    except (KeyError, ValueError, RuntimeError, IndexError) as error:
        raise ModelLoadError(
            f"{stored.file}: tensors of {stored.dtype} weights are missing or do not fit together "
            f"({error}); get the whole checkpoint again"
        ) from error
    return reader


def read_blocks(stored: StoredTensor) -> Bytes:
    """The stored bytes [R, blocks of a row, N] of a GGUF tensor, its rows in transformers' order.

    They lie in the mapped file, where the order is the same.

    Raises:
        ModelLoadError: the file is damaged.
    """
    place = stored.gguf
    assert place is not None
    *rows, inputs = stored.shape
    shape = (*rows, inputs // place.kind.block_weights, place.kind.block_bytes)
    try:
        mapped = np.memmap(stored.file, np.uint8, "r", place.start, shape)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{stored.file} cannot be read as GGUF: {error}") from error
    blocks: Bytes = mapped.view(np.ndarray)
    return half_split_rows(blocks, place.heads) if place.heads else blocks


def half_split_rows(rows: Bytes, heads: int) -> Bytes:
    """Undo llama.cpp's row order of queries and keys.

    It interleaves the two halves that rotary embedding pairs; transformers keeps them apart.
    """
    paired = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _dtype(kind: Kind) -> Any:
    import torch

    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind.name, torch.float32)


def _from_safetensors(stored: StoredTensor, name: str) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(stored.file), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{stored.file} cannot be read ({error}); it is damaged or was not downloaded to its "
            "end"
        ) from error
