"""The kernels' ARM code, compiled elsewhere and run by an emulator of such CPUs.

Needs ``apt install g++-aarch64-linux-gnu qemu-user``; skipped without.

ARM's bits are those of plain C++ on any machine: both have vectors of four floats, whose sums are
taken in one order, and multiply-adds that round once (plain C++ emulates them). Exponentials are
the kernel's own. Only a rotary angle's cosine and sine are the system's: one C library gives both
sides the same floats, another could differ in the last bit. x86's wider vectors sum up in another
order, so their bits are their own, but for products of integers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from foredraft.kernels.build import find_compiler
from foredraft.kernels.instructions import INSTRUCTION_SETS
from tests.kernels.drivers import COMMON, FORWARDS, KERNELS, PRODUCTS, compile_driver, output_of

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
INSTALL = "apt install g++-aarch64-linux-gnu qemu-user"
FLAGS = {
    **{" ".join(one.flags): one.flags for one in INSTRUCTION_SETS if "aarch64" in one.machines},
    "plain": (),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}
PATHS = {name: FLAGS[name] for name in ("-march=armv8.2-a+dotprod", "plain")}
"""Kernels that ARM machines choose by default."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def plain_output(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """Output of plain C++ on this machine, by driver."""
    for program in (CROSS, EMULATOR):
        _needed(program)
    compiler = [*find_compiler(os.environ), "-O2", "-DFOREDRAFT_EMULATE_FMA"]
    folder = tmp_path_factory.mktemp("plain")
    return {
        driver: output_of([str(compile_driver(compiler, driver, folder)), "2"])
        for driver in (PRODUCTS, FORWARDS)
    }


def _needed(program: str) -> str:
    return shutil.which(program) or pytest.skip(f"no {program}: {INSTALL}")


def _emulated(driver: Path, flags: tuple[str, ...], folder: Path) -> str:
    """Output of a driver on an emulated ARM, with teams of two threads."""
    emulator = _needed(EMULATOR)
    program = compile_driver([_needed(CROSS), "-O2", *flags, "-static"], driver, folder)
    return output_of([emulator, "-cpu", "max", str(program), "2"])


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_products_have_the_bits_of_plain_code(
    flags: tuple[str, ...], plain_output: dict[Path, str], tmp_path: Path
) -> None:
    assert _emulated(PRODUCTS, flags, tmp_path) == plain_output[PRODUCTS]


@pytest.mark.parametrize("flags", PATHS.values(), ids=PATHS)
def test_whole_forwards_have_the_bits_of_plain_code(
    flags: tuple[str, ...], plain_output: dict[Path, str], tmp_path: Path
) -> None:
    found = _emulated(FORWARDS, flags, tmp_path)
    assert found == plain_output[FORWARDS]
    assert found.count("bfloat16 int4") == 5


@pytest.mark.parametrize("library", ["decoder", "heads", "noise"])
def test_arm_compiles_without_a_warning(library: str, tmp_path: Path) -> None:
    for flags in FLAGS.values():
        command = [
            *(_needed(CROSS), *COMMON, "-O2", *flags, "-Wall", "-Werror", "-shared", "-fPIC"),
            *(str(KERNELS / f"{library}.cpp"), "-o", str(tmp_path / f"{library}.so")),
        ]
        subprocess.run(command, check=True)
