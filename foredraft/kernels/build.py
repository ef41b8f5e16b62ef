"""Compiles foredraft's C++ for this very CPU, once, and loads it.

Each library (the fused decoder, the noise) is kept in foredraft's cache under a key of everything
it depends on: sources, compiler, flags and CPU. It is written beside its place and moved there,
under a lock, so two processes never see half of it. A new one replaces the oldest when there are
several.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from foredraft.paths import cache_root

SWITCH = "FOREDRAFT_KERNELS"
"""Environment variable; "off" makes foredraft run without compiled kernels."""

_SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"),
    "-fvisibility=hidden",
    "-ffp-contract=off",  # multiply-adds only where the source says so: see simd.h
)
_FLAGS_OF = {"decoder": ("-fopenmp",), "noise": ()}
"""The libraries, each of one source file of its name, and what else each is compiled with."""
_TIMEOUT_SECONDS = 300.0
_MAX_KEPT = 4
"""Libraries kept of a name, the newest: of other compilers, versions of foredraft, and CPUs that
share the cache."""


class KernelUnavailable(Exception):  # noqa: N818 - a state of the machine, not a mistake
    """The fused kernel cannot run here. The message is one line: why, and what would help."""


@functools.cache
def load_library(name: str = "decoder") -> ctypes.CDLL:
    """A compiled library, built first if this machine has not got it yet (some seconds).

    Raises:
        KernelUnavailable: it is switched off, or cannot be compiled or loaded here.
    """
    if os.environ.get(SWITCH, "").lower() == "off":
        raise KernelUnavailable(f"switched off by {SWITCH}=off")
    library = build(find_compiler(os.environ), cache_root() / "kernels", name=name)
    return _loaded(library)


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """The compiler's command line: ``$CXX`` if it is set, else the first one on the path.

    Raises:
        KernelUnavailable: there is none.
    """
    path = environment.get("PATH")
    if chosen := shlex.split(environment.get("CXX", "")):
        if shutil.which(chosen[0], path=path) is None:
            raise KernelUnavailable(
                f"CXX is {chosen[0]!r}, which is not there; correct or unset it"
            )
        return chosen
    for name in _COMPILERS:
        if found := shutil.which(name, path=path):
            return [found]
    raise KernelUnavailable("no C++ compiler found: install g++ (Debian, Ubuntu: apt install g++)")


def build(
    compiler: list[str], directory: Path, sources: Path = _SOURCES, name: str = "decoder"
) -> Path:
    """Compile a library's source into ``directory`` unless that is done; the library's path.

    Raises:
        KernelUnavailable: the compiler fails, or the directory cannot be written.
    """
    key = _key(compiler, sources, name)
    library = directory / f"{name}-{key}.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / f"{name}-{key}.lock"):
            if not library.exists():
                _compile([*compiler, *_FLAGS, *_FLAGS_OF[name]], sources / f"{name}.cpp", library)
                _remove_old(library, name)
    except OSError as problem:
        raise KernelUnavailable(f"cannot write the kernel into {directory}: {problem}") from None
    return library


def _compile(command: list[str], source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as scratch:
        output = Path(scratch) / library.name
        done = _run([*command, str(source), "-o", str(output)])
        if done.returncode != 0:
            raise KernelUnavailable(f"{command[0]} failed: {_first_error(done.stderr)}")
        os.replace(output, library)


def _remove_old(new: Path, name: str) -> None:
    """Remove a name's old libraries. A process that has loaded one can go on using it."""
    others: list[tuple[float, Path]] = []
    for library in new.parent.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):  # another process is removing it as well
            others.append((library.stat().st_mtime, library))
    others = sorted(other for other in others if other[1] != new)
    for _, library in others[: 1 - _MAX_KEPT]:
        with contextlib.suppress(OSError):  # it only takes up room
            library.unlink()


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower()), lines[0] if lines else "no word"
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise KernelUnavailable(f"{command[0]} took over {_TIMEOUT_SECONDS:.0f} seconds") from None


def _key(compiler: list[str], sources: Path, name: str) -> str:
    """Names everything that the machine code depends on."""
    version = _run([*compiler, "--version"])
    if version.returncode != 0:
        raise KernelUnavailable(f"{compiler[0]} --version failed: {_first_error(version.stderr)}")
    digest = hashlib.sha256()
    for part in (*compiler, version.stdout, *_FLAGS, *_FLAGS_OF[name], _cpu()):
        digest.update(part.encode() + b"\0")
    for path in [*sorted(sources.glob("*.h")), sources / f"{name}.cpp"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """Model and instruction set; ``-march=native`` looks at no more than this."""
    named = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = sorted({line for line in lines if line.startswith(named)})
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *facts])


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as problem:
        raise KernelUnavailable(
            f"the compiled kernel cannot be loaded ({problem}); delete {library} to build it anew"
        ) from None
