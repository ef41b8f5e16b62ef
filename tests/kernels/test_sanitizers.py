"""The kernel's own tests once more, compiled so that stray reads and writes end the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZERS = ("asan", "ubsan")
CORE = "tree_node or rows_of_a_batch or kept_path or (chunks and 33) or growing or taps or forked"
"""Every way to lay out a forward; each test runs in all formats."""

PRODUCTS = "tiles and (130 or company or one_tile) or extreme"
"""Tiles and the plain C++ that stands for them."""

OVERFLOW = """
#include <cstdint>
extern "C" __attribute__((visibility("default")))
int32_t behind(const int32_t* values, int64_t count) { return values[count]; }
"""
READS_BEHIND = """
import ctypes, sys, torch
values = torch.zeros(100, dtype=torch.int32)
ctypes.CDLL(sys.argv[1]).behind(ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(100))
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose compiler puts checks in and whose Python can run them."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    runtimes = [_runtime(compiler, name) for name in SANITIZERS]
    if not all(map(os.path.isabs, runtimes)):
        pytest.skip("g++ is there without its sanitizers")
    return os.environ | {
        "CXX": f"{compiler} -g1 -fsanitize=address,undefined -fno-sanitize-recover=all",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
        "FOREDRAFT_CACHE": str(tmp_path_factory.mktemp("sanitized")),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def _runtime(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name=lib{name}.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("library", "tests", "which"),
    [
        ("decoder", "tests/models/test_fused.py", CORE),
        ("products", "tests/kernels/test_products.py", PRODUCTS),
        ("attention", "tests/kernels/test_attention.py", "chain or tree or anything"),
        ("heads", "tests/drafters/test_candidates.py", ""),
        ("noise", "tests/core/test_noise.py", ""),
    ],
)
def test_kernels_stay_within_their_memory(
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


@pytest.mark.slow
def test_a_read_behind_a_tensor_would_be_seen(sanitized: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "behind.cpp").write_text(OVERFLOW)
    library = tmp_path / "behind.so"
    flags = ["-shared", "-fPIC", str(tmp_path / "behind.cpp"), "-o", str(library)]
    compiler = {k: v for k, v in sanitized.items() if k != "LD_PRELOAD"}
    subprocess.run([*sanitized["CXX"].split(), *flags], env=compiler, check=True)
    command = [sys.executable, "-c", READS_BEHIND, str(library)]
    done = subprocess.run(command, env=sanitized, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
