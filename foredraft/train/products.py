"""The type in which training multiplies matrices: one that the machine is fast at.

CPUs without bfloat16 instructions emulate its products: the optimiser's alone took 17 s a step in
bfloat16 and takes half a second in float32 (AVX2, two cores, eagle for a model of 135M parameters).
"""

from __future__ import annotations

import torch


def product_dtype(device: torch.device, float32: bool = False) -> torch.dtype:
    """bfloat16 where its products are fast, else float32. All products of training ask here.

    Args:
        float32: take that in any case.
    """
    if float32:
        return torch.float32
    fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
