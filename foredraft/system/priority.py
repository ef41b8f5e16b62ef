"""Threads that let others go first."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_NICENESS = 10


def lower_priority() -> None:
    """Let the engine's threads go before this one. Only Linux has a priority for each thread.

    Otherwise a thread that computes takes turns with those of a step, which wait for each other.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may not allow it
            os.nice(_NICENESS)
