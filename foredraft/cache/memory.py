"""How much memory a cache may take: what was asked for, or a share of what there is."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

_SHARE = 4
"""Of the memory, a cache takes one part in so many at most, unless it is told otherwise."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]?i?)b?\s*", re.IGNORECASE)


def checked_memory(name: str, value: object) -> int | None:
    """Bytes from a number of them or a text such as "2GB" or "512MiB"; None stays None.

    Raises:
        ConfigError: it is neither, or nothing.
    """
    if value is None:
        return None
    num_bytes = 0
    if type(value) is int:
        num_bytes = value
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        factor = _UNITS.get(found[2].lower())
        num_bytes = int(float(found[1]) * factor) if factor else 0
    if num_bytes <= 0:
        raise ConfigError(
            f"{name} is {value!r}; it must be a number of bytes, or a size such as '2GB' or "
            "'512MiB'"
        )
    return num_bytes


def default_memory(device: torch.device | str) -> int:
    """Bytes that a cache on ``device`` may take if nobody says how many."""
    import torch  # slow to import, and sizes are checked without it

    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) // _SHARE
    return machine_memory() // _SHARE


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return there
    return min(there, int(limit)) if limit.isdecimal() else there
