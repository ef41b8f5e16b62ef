"""Stand-alone programs around the kernels, for builds that Python cannot load."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "foredraft/kernels"
FORWARDS = Path(__file__).parent / "forward_driver.cpp"
"""Takes the most threads of a forward."""

CORES = Path(__file__).parent / "core_driver.cpp"
PRODUCTS = Path(__file__).parent / "products_driver.cpp"
COMMON = ("-std=c++17", "-pthread", "-ffp-contract=off", f"-I{KERNELS}")


def compile_driver(compiler: Sequence[str], source: Path, folder: Path) -> Path:
    """The program that a compiler with all its further flags makes of a source."""
    program = folder / source.stem
    subprocess.run([*compiler, *COMMON, str(source), "-o", str(program)], check=True)
    return program


def output_of(command: Sequence[str]) -> str:
    """The output of a program; it must succeed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
