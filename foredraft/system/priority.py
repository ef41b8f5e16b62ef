"""Threads that let others go first."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICENESS = 10


def lower_priority() -> None:
    """Let the engine's threads go before this one. Only Linux has a priority for each thread.

    Otherwise a thread that computes takes turns with those of a step, which wait for each other
    hundreds of times: one more thread than cores makes a step six times as long.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may not allow it
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
