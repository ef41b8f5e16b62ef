"""Limits that containers set: of the process's cgroup and all above it, in both versions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""Where ``proc`` and ``sys`` are."""
_MEMORY_FILES = {2: ("max", "current", ""), 1: ("limit_in_bytes", "usage_in_bytes", "total_")}
_CACHED = re.compile(r"^(total_|)(?:in)?active_file (\d+)$", re.MULTILINE)


def memory_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """Bytes of memory of each cgroup that has a limit: the limit, and what is left of it.

    The kernel reclaims the page cache when memory is short, so cached files count as free.
    """
    for folder, version in _folders("memory", root):
        names = _MEMORY_FILES[version]
        limit, taken = (_text(folder / f"memory.{name}").strip() for name in names[:2])
        if limit.isdecimal():  # "max", or no such file: no limit
            counts = _CACHED.findall(_text(folder / "memory.stat"))
            cached = sum(int(count) for of_all, count in counts if of_all == names[2])
            yield int(limit), max(0, int(limit) - max(0, int(taken or 0) - cached))


def cpu_limits(root: Path = ROOT) -> Iterator[float]:
    """CPUs' time in each second, one number for each cgroup that has a quota."""
    for folder, version in _folders("cpu", root):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        else:
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            quota, period = (_text(folder / name).strip() for name in names)
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1: no quota
            yield int(quota) / int(period)


def available_cpus(root: Path = ROOT) -> int:
    """CPUs that this process may use: of all there are, those of its affinity, within its quota.

    A quota that is no whole number is rounded: threads beyond it would be stopped for most of a
    period, and all others wait for them.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, round(min([cpus, *cpu_limits(root)])))


def _folders(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Folders that may limit the process, and the version of cgroups that each belongs to."""
    mounted = root / "sys/fs/cgroup"
    groups = [(mounted, Path(), 2), (mounted / controller, Path(), 1)]
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, colon, path = line.partition(":")[2].partition(":")
        if not colon:
            continue
        group = Path(path.lstrip("/"))
        if not controllers:  # version 2 has one hierarchy for all
            groups.append((mounted, group, 2))
        elif controller in controllers.split(","):
            groups.append((mounted / controller, group, 1))
    for mount, group, version in groups:
        for above in (group, *group.parents):
            yield mount / above, version


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
