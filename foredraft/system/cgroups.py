"""Limits that containers set: of the process's cgroup (version 2) and all above it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""Where ``proc`` and ``sys`` are."""
_CACHED = re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE)


def memory_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """Bytes of memory of each cgroup that has a limit: the limit, and what is left of it.

    Cached files give way, so they count as left.
    """
    for folder in _folders(root):
        limit, taken = (_text(folder / f"memory.{name}").strip() for name in ("max", "current"))
        if limit.isdecimal():  # "max", or no such file: no limit
            cached = sum(map(int, _CACHED.findall(_text(folder / "memory.stat"))))
            yield int(limit), max(0, int(limit) - max(0, int(taken or 0) - cached))


def cpu_limits(root: Path = ROOT) -> Iterator[float]:
    """CPUs' time in each second, one number for each cgroup that has a quota."""
    for folder in _folders(root):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max": no quota
            yield int(quota) / int(period)


def available_cpus(root: Path = ROOT) -> int:
    """CPUs that this process may use: of all there are, those of its affinity, within its quota.

    A quota that is no whole number is rounded: threads beyond it would be stopped for most of a
    period, and all others wait for them.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, round(min([cpus, *cpu_limits(root)])))


def _folders(root: Path) -> Iterator[Path]:
    """Folders that may limit the process."""
    mounted, groups = root / "sys/fs/cgroup", {Path()}
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::/"):
            group = Path(line.removeprefix("0::/"))
            groups |= {group, *group.parents}
    return (mounted / group for group in groups)


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
