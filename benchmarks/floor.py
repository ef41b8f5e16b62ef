"""This machine's limits: its memory bandwidth and its rate of matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.timing import Stopwatch

_ROUNDS = 7


@dataclass(frozen=True)
class _Work:
    """Sizes of the measurement: large enough that start-up time is negligible.

    Attributes:
        read_bytes: of the block that is read, beyond what caches hold.
        matmul_size: rows and columns of the matrices.
        repeats: of each, queued one behind the other.
    """

    read_bytes: int
    matmul_size: int
    repeats: int


_CPU = _Work(512 * 2**20, 1536, 1)
_GPU = _Work(2 * 2**30, 8192, 10)


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
        """Lower bound of a forward's time: all weights read once, or all products computed."""
        read_s = weight_bytes / self.bytes_per_s
        multiply_s = 2.0 * num_parameters * num_tokens / self.flops_per_s
        return 1e3 * max(read_s, multiply_s)


def measure_machine(device: str, dtype: torch.dtype) -> Machine:
    """Rates of ``device``; products in ``dtype`` on CUDA and in float32 on CPU."""
    on_gpu = device.startswith("cuda")
    work, kind = (_GPU, dtype) if on_gpu else (_CPU, torch.float32)
    block = torch.ones(work.read_bytes // 4, device=device)
    left = torch.randn(work.matmul_size, work.matmul_size, device=device, dtype=kind)
    return Machine(
        bytes_per_s=work.read_bytes / _median_s(lambda: block.sum(), work.repeats),
        flops_per_s=2.0 * work.matmul_size**3 / _median_s(lambda: left @ left, work.repeats),
    )


def _median_s(work: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, the first calls left out."""
    times = []
    for _ in range(_ROUNDS + 1):
        watch = Stopwatch()
        with watch:
            for _ in range(repeats):
                work()
        times.append(watch.seconds / repeats)
    return statistics.median(times[1:])
