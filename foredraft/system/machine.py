"""A description of this machine, for `doctor` and for the record of every measurement."""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from foredraft.system.cgroups import available_cpus
from foredraft.version import __version__

_PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "llama-cpp-python")

_READ_BYTES = 128 << 20
"""Bytes to read: far more than CPU caches hold."""


def describe_machine() -> dict[str, Any]:
    """CPU, its instructions, accelerator, threads and versions."""
    import torch

    from foredraft.kernels.build import describe_instructions

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": available_cpus(),
        **describe_instructions(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": {"foredraft": __version__, "python": platform.python_version()}
        | {name: found for name in _PACKAGES if (found := package_version(name))},
    }


def memory_bytes_per_s() -> float:
    """Memory bandwidth in bytes a second with torch's threads: the best of three reads."""
    import time

    import torch

    numbers, best = torch.zeros(_READ_BYTES // 4, dtype=torch.float32), 0.0
    for _ in range(3):
        started = time.perf_counter()
        numbers.sum()
        best = max(best, _READ_BYTES / (time.perf_counter() - started))
    return best


def give_memory_back() -> None:
    """Return freed memory that the C library holds to the system (``malloc_trim``).

    Repacking weights leaves tens of megabytes that are never used again. Does nothing if the
    library is not glibc.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def energy_joules(zones: Path = Path("/sys/class/powercap")) -> float | None:
    """Energy counter of the processor's packages, in joules; None where it cannot be read.

    Linux offers it for Intel and AMD processors (RAPL), mostly to root alone. The counter wraps
    around after some kilojoules.
    """
    try:
        found = [int((zone / "energy_uj").read_text()) for zone in zones.glob("intel-rapl:?")]
    except (OSError, ValueError):
        return None
    return sum(found) / 1e6 if found else None
