"""The quantised blocks that a checkpoint was converted from, stored beside it.

Converting quantised weights to bfloat16 rounds a second time, and quantising these again rounds a
third time. So the converter stores the source's blocks in a file of their own, and weights of the
same number of bits are taken from there: they are the model's own weights.

Shape legend: R rows, K inputs, B blocks of 32 inputs; see `foredraft.models.native.quant`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.models.native.quant import SCALE_INPUTS, Blocks

FILE = "source-blocks.safetensors"
_KINDS = ("integers", "scales", "minima")


def save_blocks(directory: Path, blocks: Mapping[str, Blocks]) -> None:
    """Write blocks by the names of the weights that were made from them."""
    tensors: dict[str, Tensor] = {}
    for name, found in blocks.items():
        integers_RBK = found.integers_RBK
        if found.minima_RB is not None:
            tensors[f"{name}:minima"] = found.minima_RB.contiguous()
            integers_RBK = integers_RBK[..., 0::2] | (integers_RBK[..., 1::2] << 4)  # two a byte
        tensors[f"{name}:integers"] = integers_RBK.contiguous()
        tensors[f"{name}:scales"] = found.scales_RB.contiguous()
    save_file(tensors, directory / FILE)


def has_blocks(directory: Path) -> bool:
    """Whether a checkpoint keeps the integers that it was made from."""
    return (directory / FILE).is_file()


def stacked_blocks(directory: Path, names: Sequence[str], weight_RK: Tensor) -> Blocks | None:
    """The blocks that some weights, concatenated by rows, were made from; None: there are none.

    Args:
        weight_RK: the weights themselves. Blocks that do not dequantise to them, because
            the checkpoint was changed since, do not count.
    """
    try:
        with safe_open(str(directory / FILE), framework="pt") as file:
            keys = set(file.keys())
            if not keys.issuperset(f"{name}:scales" for name in names):
                return None
            parts = [
                [file.get_tensor(f"{name}:{kind}") for kind in _KINDS if f"{name}:{kind}" in keys]
                for name in names
            ]
    except (SafetensorError, OSError):
        return None
    if len({len(part) for part in parts}) != 1:
        return None
    integers_RBK, *others = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if len(others) == 2:
        both = integers_RBK
        integers_RBK = torch.stack((both & 15, (both >> 4) & 15), dim=-1).flatten(-2)
    blocks = Blocks(integers_RBK, *others)
    return blocks if _gives(blocks, weight_RK) else None


def _gives(blocks: Blocks, weight_RK: Tensor) -> bool:
    shape = weight_RK.shape[0], weight_RK.shape[1] // SCALE_INPUTS, SCALE_INPUTS
    if tuple(blocks.integers_RBK.shape) != shape:
        return False
    return torch.equal(blocks.dequantised().to(torch.bfloat16), weight_RK.to(torch.bfloat16))
