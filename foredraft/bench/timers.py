"""A stopwatch that waits for a GPU."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Adds up the seconds of its ``with`` blocks, work queued on a GPU included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._started
