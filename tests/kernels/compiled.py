"""Kernels compiled for one instruction set, or as plain C++ that stands for one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from foredraft.kernels.build import KernelUnavailable, build, find_compiler
from foredraft.kernels.instructions import InstructionSet
from foredraft.system.paths import cache_root
from tests.kernels.drivers import KERNELS


def compiled(source: str, instructions: InstructionSet) -> ctypes.CDLL:
    """The library of ``source``.cpp beside this file, with the headers of the kernels.

    The test is left out where there is no compiler.
    """
    try:
        compiler = find_compiler(os.environ)
    except KernelUnavailable as reason:
        pytest.skip(str(reason))
    with TemporaryDirectory() as name:
        folder = Path(name)
        for path in (*KERNELS.glob("*.h"), Path(__file__).with_name(f"{source}.cpp")):
            (folder / path.name).symlink_to(path)
        library = build(compiler, cache_root() / "kernels", source, instructions, folder)
        return ctypes.CDLL(str(library))
