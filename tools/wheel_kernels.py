"""The build hook of ``make wheel``: compiles kernels for every instruction set into the wheel.

The compiler is ``$CXX`` or the first one on the path. The wheel is for the machine and the glibc
that it compiles for, so a cross compiler makes another machine's wheel. Libraries in foredraft's
cache are not compiled again.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from foredraft.kernels import build  # noqa: E402 - foredraft is not installed where wheels are built
from foredraft.kernels.instructions import INSTRUCTION_SETS, InstructionSet, choose  # noqa: E402

HERE = "FOREDRAFT_WHEEL_HERE"
"""Environment variable: if set, the wheel has the instruction set of this machine alone."""

_MACHINES = {62: "x86_64", 183: "aarch64"}
"""By the number in the header of an ELF file."""
_MACHINE_OFFSET = 18
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)\0")
_LEAST_GLIBC = (2, 17)
"""Of the oldest system that pip knows by its glibc alone."""


class KernelHook(BuildHookInterface[Any]):
    """Adds ``foredraft/kernels/compiled`` to the wheel, and names its platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written."""
        if version == "editable":
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="foredraft-wheel-")
        libraries = compile_all(Path(self._scratch.name))
        folder = f"foredraft/kernels/{build.SHIPPED}"
        build_data["force_include"] |= {str(one): f"{folder}/{one.name}" for one in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written."""
        if version != "editable":
            self._scratch.cleanup()


def compile_all(folder: Path) -> list[Path]:
    """Each library for each instruction set, in ``folder`` under its name in a wheel."""
    compiler = build.find_compiler(os.environ)

    def compiled(name: str, instructions: InstructionSet) -> Path:
        library = build.build_in_cache(compiler, build.directories(), name, instructions)
        prefix = build.shipped_prefix(name, instructions)
        shipped = folder / f"{prefix}-{build.digest(library.read_bytes())}.so"
        return Path(shutil.copyfile(library, shipped))

    machine = machine_of(compiled(build.LIBRARIES[-1], INSTRUCTION_SETS[-1]))
    everything = [one for one in INSTRUCTION_SETS if not one.machines or machine in one.machines]
    sets = [choose()] if os.environ.get(HERE) else everything
    return [compiled(name, one) for one in sets for name in build.LIBRARIES]


def platform_tag(libraries: list[Path]) -> str:
    """The oldest glibc whose names all libraries can do with, as pip spells it."""
    needs = max(glibc_of(library) for library in libraries)
    major, minor = max(needs, _LEAST_GLIBC)
    return f"manylinux_{major}_{minor}_{machine_of(libraries[0])}"


def machine_of(library: Path) -> str:
    """What `platform.machine` says where the library runs."""
    number = int.from_bytes(library.read_bytes()[_MACHINE_OFFSET:][:2], "little")
    return _MACHINES[number]


def glibc_of(library: Path) -> tuple[int, int]:
    """The newest version of glibc that the library asks for a name of."""
    found = _GLIBC.findall(library.read_bytes())
    return max((int(major), int(minor)) for major, minor in found)


def get_build_hook() -> type[KernelHook]:
    """For hatchling."""
    return KernelHook
