"""Atomic file writes: a killed process leaves either the whole file or none."""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foredraft.core.errors import TrainingError

_ABANDONED_S = 3600.0
"""An unfinished file this old belongs to a process that was killed."""


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write. At the end it is flushed to disk and replaces the old one.

    Raises:
        TrainingError: it cannot be written; the old file is unchanged.
    """
    with _explained(path):
        with replacing(path) as file:
            yield file
        flush_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that replaces the old one at the end; the folder is not flushed to disk.

    For files that can be made again. Errors are the system's own.
    """
    with _unfinished(path) as new:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)


def write_text(path: Path, text: str) -> None:
    """A whole text file; see `write_atomically`."""
    with write_atomically(path) as file:
        file.write(text.encode())


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    mode: int = 0o644,
) -> None:
    """A whole safetensors file that ``mode`` lets read and write; see `write_atomically`."""
    with _unfinished(path) as new, _explained(path):
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(kept, new, dict(metadata or {}))
        new.chmod(mode)  # safetensors makes files for their owner alone
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
        flush_folder(path.parent)


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A name to write under, beside ``path``; gone at the end.

    Every writer gets a name of its own: if two processes write the same file at once, the last one
    wins. Leftovers of killed processes are removed once they are old.
    """
    for other in path.parent.glob(f".{path.name}.*.partial"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > _ABANDONED_S:
                other.unlink()
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield new
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def flush_folder(directory: Path) -> None:
    """Flush a folder's renames to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the system, as a `TrainingError` that says what is safe and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # the library's own error holds the system's text
        raise TrainingError(_cannot_write(path, error)) from error


def _cannot_write(path: Path, error: Exception) -> str:
    if getattr(error, "errno", None) != errno.ENOSPC and "No space left" not in str(error):
        return f"cannot write {path}: {error}. Earlier files are whole"
    free = ""
    with suppress(OSError):
        free = f" ({shutil.disk_usage(path.parent).free / 1e9:.2f} GB are free)"
    return (
        f"the disk is full: {path} was not written{free}. Earlier files are whole; free "
        "some space and run the same command again"
    )
