"""The memory limit of caches: the configured one, or a share of the machine's memory."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import ConfigError
from foredraft.system.cgroups import ROOT, memory_limits

if TYPE_CHECKING:
    import torch

UNLIMITED = 2**31 - 1
"""Tokens or blocks when no limit is set."""

_SHARE = 4
"""By default caches take at most this fraction (1 / value) of the memory."""
_FREE_SHARE = 2
"""And at most this fraction of the memory that weights and work leave free."""
_OF_MODEL = 4
"""And at most so many times the model itself: a small one is not to fill a large machine."""
_ENOUGH = 1 << 30
"""Which any model may take."""
_LEAST = 64 << 20


class CacheMemory:
    """One limit for all caches that are made with it: a target's, its draft model's, their layers.

    A row has an entry for each of its tokens in every cache, so all caches hold the same number of
    tokens.

    Args:
        num_bytes: limit of all entries together; None: no limit.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        self.num_bytes = num_bytes
        self._token_bytes = 0  # of an entry in every cache

    @classmethod
    def of(
        cls, memory: CacheMemory | int | None, device: torch.device | str, to_come: int = 0
    ) -> CacheMemory:
        """``memory`` itself, or one with that limit in bytes; None: see `default_memory`."""
        if isinstance(memory, CacheMemory):
            return memory
        return cls(default_memory(device, to_come) if memory is None else memory)

    @property
    def num_tokens(self) -> int:
        """Most tokens of each cache. Any thread may read it."""
        if self.num_bytes is None or not self._token_bytes:
            return UNLIMITED
        return self.num_bytes // self._token_bytes

    def add(self, user: object, token_bytes: int) -> None:
        """Register ``user`` with its bytes a token, until it is garbage-collected."""
        self._token_bytes += token_bytes
        weakref.finalize(user, self._remove, token_bytes).atexit = False

    def _remove(self, token_bytes: int) -> None:
        self._token_bytes -= token_bytes


def checked_memory(name: str, value: object) -> int | None:
    """Bytes from a number of them or a text such as "2GB" or "512MiB"; None stays None.

    Raises:
        ConfigError: it is neither, or nothing.
    """
    if value is None:
        return None
    from pydantic import ByteSize, TypeAdapter, ValidationError

    num_bytes = 0
    if isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValidationError):
            num_bytes = int(TypeAdapter(ByteSize).validate_python(value))
    if num_bytes <= 0:
        raise ConfigError(
            f"{name} is {value!r}; it must be a number of bytes, or a size such as '2GB' or "
            "'512MiB'"
        )
    return num_bytes


def default_memory(device: torch.device | str, to_come: int = 0) -> int:
    """Default limit in bytes of the caches on ``device``.

    Args:
        to_come: bytes of weights and work that are not taken yet.
    """
    import torch  # slow to import, and sizes are checked without it

    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(int(free) - to_come, 0) // _FREE_SHARE
    left = available_memory() - to_come
    of_model = max(_OF_MODEL * to_come, _ENOUGH) if to_come else machine_memory()
    return max(min(machine_memory() // _SHARE, left // _FREE_SHARE, of_model), _LEAST)


def check_fits(name: str, weights: int, work: int, cache: int | None = None) -> None:
    """Refuse a model that this machine's memory cannot hold, before it is loaded.

    Args:
        weights, work: in bytes.
        cache: bytes that caches may take; None: what is left.

    Raises:
        ConfigError: it cannot.
    """
    if weights + work + (cache or _LEAST) > (there := machine_memory()):
        asked = f", and {cache / 1e9:.1f} GB for caches" if cache else ""
        raise ConfigError(
            f"{name} takes {weights / 1e9:.1f} GB for weights and {work / 1e9:.1f} GB for work"
            f"{asked}, and this machine has {there / 1e9:.1f} GB for us: take a file in fewer bits "
            "(such as Q4_K_M), weights='int4', less cache_memory, or a smaller model"
        )


def machine_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process may use: the machine's, or the lowest cgroup limit.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    return min([_built_in(), *(limit for limit, _ in memory_limits(root))])


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can be taken now without swapping, as far as the system says.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    there = [_built_in(), *(left for _, left in memory_limits(root))]
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                there.append(1024 * int(amount.split()[0]))
    return min(there)


def _built_in() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
