"""Kernels of Triton run on a GPU, or on the CPU by its interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEEDS_GPU = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"
)
DEVICE = "cpu" if INTERPRETED else "cuda"
