"""Rotary position embedding (arXiv 2104.09864), rotating the two halves of a head.

Shape legend: T tokens, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foredraft.models.native.config import DecoderConfig


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Rotation speed of each pair of a head, float32 [D / 2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq: Tensor = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_inv_freq_scaling
    if scaling is None:
        return inv_freq
    if scaling["rope_type"] == "linear":
        return inv_freq / float(scaling["factor"])
    return _llama3(inv_freq, scaling)


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: slow rotations are slowed by ``factor``, fast ones kept, with a ramp between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = inv_freq * (float(scaling["original_max_position_embeddings"]) / (2 * math.pi))
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / factor * (1 - ramp) + inv_freq * ramp


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate every head; ``cos`` repeats its half, ``sin`` too, with its first half negated."""
    swapped = torch.roll(x_THD, x_THD.shape[-1] // 2, -1)
    return x_THD * cos_TD[:, None] + swapped * sin_TD[:, None]
