"""Finds foredraft's C++ compiled, or compiles it once, and loads it.

A wheel brings each library (the fused decoder, the noise) for every instruction set. Elsewhere it
is compiled at first use and kept in foredraft's cache. Its name holds a key of what it depends on
(sources and flags; in the cache the compiler too) and a digest of its own bytes. Code that is not
what was compiled must not run, so before it is loaded the digest is compared. A file of the cache
must be the user's own as well; one of the package is trusted as the Python beside it is. Into the
cache it comes whole: written elsewhere, flushed, and moved into its place under a lock, so two
processes never see half of it, and neither does the one after a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from foredraft.kernels.instructions import (
    SWITCH,
    InstructionSet,
    KernelUnavailable,
    available,
    choose,
    unused_instructions,
)
from foredraft.system.paths import cache_root, mark_used, remove_unused

__all__ = ["SWITCH", "KernelUnavailable", "build", "find_compiler", "load_library"]

_log = logging.getLogger("foredraft")

LIBRARIES = ("decoder", "heads", "noise")
"""The sources beside this file, by name."""
SHIPPED = "compiled"
"""The folder beside the sources where a wheel has its libraries."""

_SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-pthread", "-shared", "-fPIC"),
    "-fvisibility=hidden",
    "-ffp-contract=off",  # multiply-adds only where the source says so: see simd.h
)
_INSTALL = (  # the first package manager that is there, and its words for a C++ compiler
    ("apt-get", "apt install g++"),
    ("dnf", "dnf install gcc-c++"),
    ("apk", "apk add g++"),
    ("pacman", "pacman -S gcc"),
    ("zypper", "zypper install gcc-c++"),
    ("xcode-select", "xcode-select --install"),
)
_TIMEOUT_SECONDS = 300.0
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def load_library(name: str = "decoder", instructions: str | None = None) -> ctypes.CDLL:
    """A compiled library: the package's own, else built first if it is not in the cache (seconds).

    Args:
        name: of the source, ``name.cpp`` beside this file.
        instructions: name of the instruction set; None: see `instructions.choose`.

    Raises:
        KernelUnavailable: it is switched off, or cannot be compiled or loaded here.
    """
    return _chosen(name, instructions)[1]


def _chosen(name: str, instructions: str | None = None) -> tuple[InstructionSet, ctypes.CDLL]:
    chosen = choose(instructions)
    if instructions or os.environ.get(SWITCH):
        return chosen, _load(name, chosen)
    return _load_best(name, tuple(one for one in available() if one.automatic))


def describe_instructions() -> dict[str, str | list[str] | None]:
    """The kernels' instruction set (None: no kernels), their origin, and unused instructions."""
    try:
        chosen, library = _chosen("decoder")
    except KernelUnavailable:
        return {"instructions": None, "instructions_unused": [], "kernels_from": None}
    in_package = Path(library._name).parent == _SOURCES / SHIPPED
    return {
        "instructions": chosen.name,
        "instructions_unused": unused_instructions(chosen),
        "kernels_from": "the package" if in_package else "this machine's compiler",
    }


@functools.cache
def _load_best(
    name: str, candidates: tuple[InstructionSet, ...]
) -> tuple[InstructionSet, ctypes.CDLL]:
    """The first that the compiler can make: older ones do not know all instructions."""
    problems: list[_NotCompiled] = []
    for one in candidates:
        try:
            library = _load(name, one)
        except _NotCompiled as problem:
            problems.append(problem)
            continue
        if problems:  # slower, and of near ties it may choose another token
            _log.warning(
                "the kernel runs with %s instead of %s: %s",
                one.name,
                candidates[0].name,
                problems[0],
            )
        return one, library
    raise problems[-1]


@functools.cache
def _load(name: str, instructions: InstructionSet) -> ctypes.CDLL:
    shipped = find_shipped(name, instructions)
    return _loaded(
        shipped or build_in_cache(find_compiler(os.environ), directories(), name, instructions)
    )


def find_shipped(name: str, instructions: InstructionSet) -> Path | None:
    """The library that came with these sources in a wheel, undamaged; None: there is none."""
    prefix = shipped_prefix(name, instructions)
    libraries = (_SOURCES / SHIPPED).glob(f"{prefix}-*.so")
    return next((found for found in libraries if _is_whole(found, prefix)), None)


def shipped_prefix(name: str, instructions: InstructionSet) -> str:
    """The name of a library in a wheel, without the digest at its end."""
    key = _key((*_FLAGS, *instructions.flags), _SOURCES / f"{name}.cpp")
    return f"{name}-{key}"


def directories() -> list[Path]:
    """Where libraries may be kept: the user's own place helps where the cache is not theirs."""
    return list(dict.fromkeys(root / "kernels" for root in (cache_root(), cache_root({}))))


def build_in_cache(
    compiler: Sequence[str], directories: Sequence[Path], name: str, instructions: InstructionSet
) -> Path:
    """`build` in the first of the directories that can be used."""
    problems: list[KernelUnavailable] = []
    for directory in directories:
        try:
            return build(compiler, directory, name, instructions)
        except _UnusableDirectory as problem:
            problems.append(problem)
    raise problems[0]


class _NotCompiled(KernelUnavailable):
    """The compiler failed; with plainer instructions it might not."""


class _UnusableDirectory(KernelUnavailable):
    """Libraries cannot be kept there; elsewhere they might."""


def install_command(path: str | None = None) -> str:
    """The command that installs a C++ compiler on this system, by the package managers found."""
    for manager, command in _INSTALL:
        if shutil.which(manager, path=path):
            as_root = manager != "xcode-select" and hasattr(os, "geteuid") and os.geteuid() != 0
            return f"sudo {command}" if as_root else command
    return "apt install g++"


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """The compiler's command line: ``$CXX`` if it is set, else the first one on the path.

    Raises:
        KernelUnavailable: there is none.
    """
    path = environment.get("PATH")
    try:
        chosen = shlex.split(environment.get("CXX", ""))
    except ValueError as problem:
        raise KernelUnavailable(
            f"CXX is {environment['CXX']!r}, which cannot be read ({problem}); correct or unset it"
        ) from None
    if chosen:
        if shutil.which(chosen[0], path=path) is None:
            raise KernelUnavailable(
                f"CXX is {chosen[0]!r}, which is not there; correct or unset it"
            )
        return chosen
    for name in _COMPILERS:
        if found := shutil.which(name, path=path):
            return [found]
    raise KernelUnavailable(f"no C++ compiler found; install one with: {install_command(path)}")


# ------------------------------------------------------------------------------------ the cache


def build(
    compiler: Sequence[str],
    directory: Path,
    name: str = "decoder",
    instructions: InstructionSet | None = None,
    sources: Path = _SOURCES,
) -> Path:
    """Compile ``name.cpp`` into ``directory`` unless that is done; the library's path.

    Raises:
        KernelUnavailable: the compiler fails, or the directory cannot be written or is another
            user's.
    """
    flags = (*_FLAGS, *(instructions or choose()).flags)
    command = (*compiler, _version(compiler), *flags)
    prefix = f"{name}-{_key(command, sources / f'{name}.cpp')}"
    try:
        _make_private(directory)
        if library := _intact(directory, prefix):
            return library
        from filelock import FileLock  # takes longer to import than to find the library

        _log.warning("compiling the kernel %r for this machine, once: about a minute …", name)
        with FileLock(directory / "building.lock", timeout=2 * _TIMEOUT_SECONDS):
            if library := _intact(directory, prefix):
                return library
            for source in sources.glob("*.cpp"):  # used as well, if a copy's times are old
                _intact(directory, f"{source.stem}-{_key(command, source)}")
            _remove_left_over(directory, prefix)
            library = _compile([*compiler, *flags], sources / f"{name}.cpp", directory / prefix)
    except OSError as problem:
        raise _UnusableDirectory(f"cannot write the kernel into {directory}: {problem}") from None
    return library


def _make_private(directory: Path) -> None:
    """Make a directory where this user and root alone can write.

    Raises:
        _UnusableDirectory: another user owns it.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = directory.stat()
    if not _is_trusted(found.st_uid):
        raise _UnusableDirectory(
            f"{directory} belongs to another user (number {found.st_uid}), whose code is not run; "
            "set FOREDRAFT_CACHE to a directory of your own"
        )
    if found.st_mode & _OTHERS_MAY_WRITE:
        directory.chmod(found.st_mode & 0o755)


def _is_trusted(user: int) -> bool:
    return not hasattr(os, "geteuid") or user in (os.geteuid(), 0)


def _intact(directory: Path, prefix: str) -> Path | None:
    """The library of that key that is undamaged and that other users could not write."""
    for library in directory.glob(f"{prefix}-*.so"):
        with contextlib.suppress(OSError):  # removed by another process, or unreadable
            found = library.stat()
            if not _is_trusted(found.st_uid) or found.st_mode & _OTHERS_MAY_WRITE:
                continue
            mark_used(library)
            if _is_whole(library, prefix):
                return library
    return None


def _is_whole(library: Path, prefix: str) -> bool:
    return digest(library.read_bytes()) == library.stem.removeprefix(f"{prefix}-")


def digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:20]


def _compile(command: Sequence[str], source: Path, target: Path) -> Path:
    """Compile, flush, and move to ``target``-digest.so. The caller holds the lock."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as scratch:
        output = Path(scratch) / target.name
        done = _run([*command, str(source), "-o", str(output)])
        if done.returncode != 0:
            raise _NotCompiled(f"{command[0]} failed: {_first_error(done.stderr)}")
        output.chmod(0o700)
        library = target.with_name(f"{target.name}-{digest(output.read_bytes())}.so")
        _flush(output)
        os.replace(output, library)
        _flush(library.parent)
    return library


def _flush(path: Path) -> None:
    """To the disk: a name must not outlive a power cut that its bytes did not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_left_over(directory: Path, prefix: str) -> None:
    """Remove files of killed builds, damaged and unused libraries. The caller holds the lock."""
    for scratch in directory.glob("building-*"):
        shutil.rmtree(scratch, ignore_errors=True)
    for library in directory.glob(f"{prefix}-*.so"):
        with contextlib.suppress(OSError):
            library.unlink()
    remove_unused(directory.glob("*-*-*.so"))  # others are a user's


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as problem:
        raise KernelUnavailable(
            f"the compiled kernel cannot be loaded ({problem}); delete {library} to build it anew"
        ) from None


# --------------------------------------------------------------------------------- the compiler


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower()), lines[0] if lines else "no word"
    )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise KernelUnavailable(f"{command[0]} took over {_TIMEOUT_SECONDS:.0f} seconds") from None
    except OSError as problem:
        raise KernelUnavailable(f"{command[0]} cannot be run: {problem}") from None


def _version(compiler: Sequence[str]) -> str:
    version = _run([*compiler, "--version"])
    if version.returncode != 0:
        raise KernelUnavailable(f"{compiler[0]} --version failed: {_first_error(version.stderr)}")
    return version.stdout


def _key(command: Sequence[str], source: Path) -> str:
    """Names everything that the machine code depends on: how it is compiled, and the sources."""
    digest = hashlib.sha256()
    for part in command:
        digest.update(part.encode() + b"\0")
    for path in [*sorted(source.parent.glob("*.h")), source]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]
