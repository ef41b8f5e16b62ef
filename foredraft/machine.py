"""What runs here: for `doctor`, and for the record of every measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from foredraft.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers")


def describe_machine() -> dict[str, Any]:
    """CPU, accelerator, threads and versions."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": available_cpus(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": {"foredraft": __version__, "python": platform.python_version()}
        | {name: found for name in _PACKAGES if (found := package_version(name))},
    }


def available_cpus() -> int:
    """CPUs that this process may use; of all there are, where that cannot be told."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The CPU as its maker calls it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
