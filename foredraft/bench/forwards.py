"""What forwards of one row and of all rows take, in turns with those who serve."""

from __future__ import annotations

import statistics
import time

from foredraft.bench.step import Size, TargetStepper
from foredraft.cache.base import Cache
from foredraft.models.base import Target


class ForwardTimes:
    """Bare forwards of one token a row, without anything around them.

    Args:
        num_rows: of the large ones.
        context: tokens in the cache of each row.
    """

    def __init__(self, target: Target, num_rows: int, context: int) -> None:
        self._stepper = TargetStepper("target", target, context, num_rows)
        self._sizes = (Size(1, 1), Size(num_rows, 1))
        self._times: list[list[float]] = [[], []]

    def __enter__(self) -> ForwardTimes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stepper.close()

    def turn(self, seconds: float = 0.03) -> None:
        """Time some of each size."""
        until = time.perf_counter() + seconds
        while True:
            for size, times in zip(self._sizes, self._times, strict=True):
                times.append(1e3 * self._stepper.step(size)["total"])
            if time.perf_counter() >= until:
                return

    def as_dict(self) -> dict[str, float]:
        """Median milliseconds, and by how much a batch raises throughput."""
        one, many = map(statistics.median, self._times)
        return {
            "one_row_ms": one,
            "all_rows_ms": many,
            "gain": self._sizes[1].rows * one / many,
        }


def grow_cache(cache: Cache, num_slots: int, num_entries: int) -> None:
    """Let a cache have room for so many slots of so many entries, so that it need not grow later.

    Whoever happens to be the one it grows for would have to wait.
    """
    slots = []
    try:
        for _ in range(num_slots):
            slots.append(cache.allocate())
            cache.reserve(slots[-1], num_entries)
    except (MemoryError, ValueError):
        pass  # a cache with a limit: it holds what it can
    finally:
        for slot in slots:
            cache.free(slot)
