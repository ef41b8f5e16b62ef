"""The kernels compiled so that stray accesses, undefined behaviour and races end the process.

A stand-alone program runs whole forwards: in plain C++ with tiles emulated, for those of a CPU are
loaded by instructions that no sanitizer sees, and in this CPU's instructions with teams of threads.
Python, which says how large everything is, runs its own tests with the sanitizers in its process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.kernels.instructions import available
from tests.kernels.drivers import FORWARDS, PRODUCTS, compile_driver, output_of

ROOT = Path(__file__).parents[2]
MEMORY, RACES = "address,undefined", "thread"
CHEAP = ("-O1", "-g1", "-fno-sanitize-recover=all")
"""With -O3 a build takes five times as long."""

PLAIN = ("-DFOREDRAFT_EMULATE_TILES",)

READS_BEHIND = """
#include <cstdint>
extern "C" __attribute__((visibility("default")))
int32_t behind(const int32_t* values, int64_t count) { return values[count]; }
"""
CALLS_IT = """
import ctypes, sys, torch
values = torch.zeros(100, dtype=torch.int32)
ctypes.CDLL(sys.argv[1]).behind(ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(100))
"""
RACE = """
#include "team.h"
int main() {
  foredraft::Team team;
  int sum = 0;
  team.run(2, [&](foredraft::Member me) { if (me.index >= 0) ++sum; });
  return sum == 0;
}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def sanitizing(sanitizer: str, folder: Path) -> list[str]:
    """A compiler whose programs are watched; skips where there is none."""
    found = shutil.which("g++") or pytest.skip("no g++")
    compiler = [found, *CHEAP, f"-fsanitize={sanitizer}"]
    (folder / "empty.cpp").write_text("int main() {}\n")
    build = [*compiler, str(folder / "empty.cpp"), "-o", str(folder / "empty")]
    for step in (build, [str(folder / "empty")]):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no -fsanitize={sanitizer} here: {done.stderr.strip()[-200:]}")
    return compiler


# ----------------------------------------------------------------------------------- whole forwards


def test_forwards_stay_within_their_memory(tmp_path: Path) -> None:
    compiler = sanitizing(MEMORY, tmp_path)
    program = compile_driver([*compiler, *PLAIN], FORWARDS, tmp_path)
    assert "tiles" in output_of([str(program), "2"])


@pytest.mark.parametrize("name", ["avx2", "portable"])
def test_products_without_digits_stay_within_their_memory(name: str, tmp_path: Path) -> None:
    """Forwards, above and below, multiply digits of activations; these take them whole."""
    flags = [one.flags for one in available() if one.name == name]
    if not flags:
        pytest.skip(f"this CPU has no {name}")
    compiler = [*sanitizing(MEMORY, tmp_path), *flags[0]]
    output_of([str(compile_driver(compiler, PRODUCTS, tmp_path))])


def test_threads_of_a_team_do_not_race(tmp_path: Path) -> None:
    compiler = sanitizing(RACES, tmp_path)
    flags = next(one.flags for one in available() if one.automatic)
    output_of([str(compile_driver([*compiler, *flags], FORWARDS, tmp_path)), "4"])


def test_a_race_would_be_seen(tmp_path: Path) -> None:
    compiler = sanitizing(RACES, tmp_path)
    (tmp_path / "race.cpp").write_text(RACE)
    program = compile_driver(compiler, tmp_path / "race.cpp", tmp_path)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "data race" in done.stderr


# -------------------------------------------------------------------------------------- from Python


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose compiler puts checks in and whose Python can run them."""
    folder = tmp_path_factory.mktemp("sanitized")
    compiler = sanitizing(MEMORY, folder)
    wrapper = folder / "c++"  # its flags come last: they count
    wrapper.write_text(f'#!/bin/sh\nexec {compiler[0]} "$@" {" ".join(compiler[1:])}\n')
    wrapper.chmod(0o700)
    runtimes = [
        output_of([compiler[0], f"-print-file-name=lib{name}.so"]).strip()
        for name in ("asan", "ubsan")
    ]
    if not all(map(os.path.isabs, runtimes)):
        pytest.skip("g++ is there without its sanitizers as shared libraries")
    return os.environ | {
        "CXX": str(wrapper),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
        "FOREDRAFT_CACHE": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.mark.parametrize(
    ("library", "tests", "which"),
    [
        ("decoder", "tests/models/test_fused.py", "tree_node or batch or growing or taps"),
        ("attention", "tests/kernels/test_attention.py", "chain or tree or anything"),
        ("heads", "tests/drafters/test_candidates.py", ""),
        ("noise", "tests/core/test_noise.py", "all_ways or same_bits or says"),
    ],
)
def test_python_hands_over_enough_memory(
    sanitized: dict[str, str], library: str, tests: str, which: str
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0"]
    command += ["-m", "not slow", str(ROOT / tests), *(("-k", which) if which else ())]
    done = subprocess.run(
        command, env=sanitized, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " skipped" not in done.stdout
    assert list((Path(sanitized["FOREDRAFT_CACHE"]) / "kernels").glob(f"{library}-*.so"))


def test_a_read_behind_a_tensor_would_be_seen(sanitized: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "behind.cpp").write_text(READS_BEHIND)
    library = tmp_path / "behind.so"
    flags = ["-shared", "-fPIC", str(tmp_path / "behind.cpp"), "-o", str(library)]
    compiler = {k: v for k, v in sanitized.items() if k != "LD_PRELOAD"}
    subprocess.run([sanitized["CXX"], *flags], env=compiler, check=True)
    command = [sys.executable, "-c", CALLS_IT, str(library)]
    done = subprocess.run(command, env=sanitized, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
