"""How slow work, such as downloads and conversions, tells of itself."""

from __future__ import annotations

import time
from typing import Protocol


class Progress(Protocol):
    """Receives reports of slow work: its current stage, and the share that is done."""

    def stage(self, text: str) -> None:
        """A new piece of work begins; ``text`` names it in a few words."""

    def advance(self, fraction: float, detail: str = "") -> None:
        """The share of the current stage that is done, 0 to 1, and a text beside it."""


class SilentProgress:
    """A `Progress` that ignores all reports."""

    def stage(self, text: str) -> None:
        pass

    def advance(self, fraction: float, detail: str = "") -> None:
        pass


class Pace:
    """Reports the bytes done, the rate, and the time left."""

    def __init__(self, progress: Progress, num_bytes: int) -> None:
        self._progress, self._total = progress, max(num_bytes, 1)
        self._done, self._started = 0, time.perf_counter()

    def add(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more as done, and report."""
        self._done += num_bytes
        rate = self._done / max(time.perf_counter() - self._started, 1e-3)
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate else ""
        self._progress.advance(
            self._done / self._total,
            f"{self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s{left}",
        )
