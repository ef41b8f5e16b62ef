"""Settings of the process that make training on CPUs faster."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE = 1 << 30
_PAD = 1 << 28


@contextmanager
def settled() -> Iterator[None]:
    """Keep freed memory for the next tensors, and take numbers near zero for zero.

    glibc gives large blocks back to the system as soon as they are freed, so every step would have
    its pages made anew, zeroed, one by one. Where there is another C library nothing happens.
    """
    _keep_freed_memory()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _keep_freed_memory() -> None:
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for setting, value in (
            (_MMAP_THRESHOLD, _LARGE),
            (_TRIM_THRESHOLD, 2 * _LARGE - 1),
            (_TOP_PAD, _PAD),
        ):
            library.mallopt(setting, value)
