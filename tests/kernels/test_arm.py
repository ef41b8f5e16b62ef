"""The kernels' ARM code, compiled elsewhere and run by an emulator of such CPUs.

Needs ``apt install g++-aarch64-linux-gnu qemu-user``; skipped without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from foredraft.kernels.build import find_compiler
from foredraft.kernels.instructions import INSTRUCTION_SETS

KERNELS = Path(__file__).parents[2] / "foredraft/kernels"
DRIVER = Path(__file__).parent / "products_driver.cpp"
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
COMMON = ("-std=c++17", "-O2", "-pthread", "-ffp-contract=off", f"-I{KERNELS}")
FLAGS = {
    **{" ".join(one.flags): one.flags for one in INSTRUCTION_SETS if "aarch64" in one.machines},
    "plain": (),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What plain C++ gives on this machine."""
    program = tmp_path_factory.mktemp("reference") / "products"
    flags = (*COMMON, "-DFOREDRAFT_EMULATE_FMA")
    subprocess.run(
        [*find_compiler(os.environ), *flags, str(DRIVER), "-o", str(program)], check=True
    )
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


def _cross_compiler() -> str:
    compiler = shutil.which(CROSS)
    return compiler if compiler else pytest.skip(f"no {CROSS}")


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_arm_gives_the_bits_of_plain_code(
    flags: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    emulator = shutil.which(EMULATOR) or pytest.skip(f"no {EMULATOR}")
    program = tmp_path / "products"
    command = [_cross_compiler(), *COMMON, *flags, "-static", str(DRIVER), "-o", str(program)]
    subprocess.run(command, check=True)
    command = [emulator, "-cpu", "max", str(program)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == expected


@pytest.mark.parametrize("library", ["decoder", "heads", "noise"])
def test_arm_compiles_without_a_warning(library: str, tmp_path: Path) -> None:
    for flags in FLAGS.values():
        command = [
            *(_cross_compiler(), *COMMON, *flags, "-Wall", "-Werror", "-shared", "-fPIC"),
            *(str(KERNELS / f"{library}.cpp"), "-o", str(tmp_path / f"{library}.so")),
        ]
        subprocess.run(command, check=True)
