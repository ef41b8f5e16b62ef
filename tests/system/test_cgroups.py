"""Limits of containers, in made-up folders of cgroups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from foredraft.cache.memory import available_memory, machine_memory
from foredraft.system.cgroups import available_cpus


def written(root: Path, groups: str, limits: Mapping[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"sys/fs/cgroup/memory.max": "5000"}, 5000),
        (
            "0::/a/b",
            {"sys/fs/cgroup/a/memory.max": "4000", "sys/fs/cgroup/a/b/memory.max": "5000"},
            4000,
        ),
        ("0::/not/here", {"sys/fs/cgroup/memory.max": "5000"}, 5000),
        ("", {}, None),
    ],
)
def test_the_limits_of_cgroups_are_seen(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None
) -> None:
    there = machine_memory(tmp_path / "nowhere")
    root = written(tmp_path, groups, limits)
    assert machine_memory(root) == (there if expected is None else expected)


STAT = "anon 700\nfile 900\ninactive_file 300\nactive_file 400\n"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        (
            "0::/a",
            {
                "sys/fs/cgroup/a/memory.max": "5000",
                "sys/fs/cgroup/a/memory.current": "2000",
                "sys/fs/cgroup/a/memory.stat": STAT,
            },
            3700,
        ),
        ("0::/", {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 3 kB"}, 3072),
    ],
)
def test_others_in_a_container_have_taken_of_its_memory(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    assert available_memory(written(tmp_path, groups, limits)) == expected


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, 4),
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"sys/fs/cgroup/cpu.max": "260000 100000"}, 3),
        ("", {}, 4),
    ],
)
def test_no_more_threads_than_a_quota_lets_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    limits: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert available_cpus(written(tmp_path, groups, limits)) == expected
