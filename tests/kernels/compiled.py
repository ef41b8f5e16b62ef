"""Kernels compiled for one instruction set, or as plain C++ that stands for one."""

from __future__ import annotations

import ctypes
import os

import pytest

from foredraft.kernels.build import KernelUnavailable, build_in_cache, find_compiler
from foredraft.kernels.instructions import InstructionSet
from foredraft.system.paths import cache_root


def compiled(source: str, instructions: InstructionSet) -> ctypes.CDLL:
    """The library of ``source``.cpp; the test is left out where there is no compiler."""
    try:
        compiler = find_compiler(os.environ)
    except KernelUnavailable as reason:
        pytest.skip(str(reason))
    path = build_in_cache(compiler, [cache_root() / "kernels"], source, instructions)
    return ctypes.CDLL(str(path))
