"""What this machine could do at best: how fast it reads memory, and how fast it multiplies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_READ_BYTES = 512 * 2**20
_MATMUL_SIZE = 1536
_ROUNDS = 7


@dataclass(frozen=True)
class Machine:
    """Measured rates.

    Attributes:
        bytes_per_s: reading memory that no cache holds.
        flops_per_s: a large matrix product (a multiply-add counts as two).
    """

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, weight_bytes: int, num_parameters: int, num_tokens: int) -> float:
        """The least a forward can take: all weights read once, or all products made."""
        read_s = weight_bytes / self.bytes_per_s
        multiply_s = 2.0 * num_parameters * num_tokens / self.flops_per_s
        return 1e3 * max(read_s, multiply_s)


def measure_machine(device: str, dtype: torch.dtype) -> Machine:
    """Rates of ``device``; products in ``dtype`` on CUDA and in float32 on CPU."""
    block = torch.ones(_READ_BYTES // 4, device=device)
    kind = dtype if device.startswith("cuda") else torch.float32
    left = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device, dtype=kind)
    return Machine(
        bytes_per_s=_READ_BYTES / _median_s(lambda: block.sum(), device),
        flops_per_s=2.0 * _MATMUL_SIZE**3 / _median_s(lambda: left @ left, device),
    )


def _median_s(work: Callable[[], object], device: str) -> float:
    work()
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
