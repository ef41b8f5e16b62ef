"""Threads that let others go first."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

_NICENESS = 10
_AT_ONCE = 0.5e-3
"""Seconds of work between two rests."""
_LONGEST = 5e-3
"""Seconds of a rest: the thread may have been without a core for most of the time."""


def lower_priority() -> None:
    """Let the engine's threads go before this one. Only Linux has a priority for each thread.

    Otherwise a thread that computes takes turns with those of a step, which wait for each other.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may not allow it
            os.nice(_NICENESS)


class Rests:
    """Rests of a thread that works in Python: up to twice as long as it has worked since the last.

    A step asks for the interpreter behind each kernel. From a thread that works all along it gets
    it late, and later still from one of low priority, which may be without a core meanwhile.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self) -> None:
        """To be called often: it rests where there was enough work."""
        worked = time.perf_counter() - self._began
        if worked > _AT_ONCE:
            time.sleep(min(2.0 * worked, _LONGEST))
            self._began = time.perf_counter()
