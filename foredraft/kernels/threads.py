"""How many threads a forward may use."""

from __future__ import annotations

import os

from foredraft.core.errors import ConfigError


def most_threads() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(num_threads: int) -> None:
    """Raises `ConfigError` for a number that this machine has no cores for."""
    most = most_threads()
    if not 1 <= num_threads <= most:
        raise ConfigError(
            f"threads is {num_threads}; this machine runs 1 to {most} of them at the same time"
        )
