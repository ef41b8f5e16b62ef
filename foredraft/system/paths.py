"""The folder of foredraft's own files, and sizes of folders."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_MONTH_SECONDS = 30 * 24 * 3600.0


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of cached files.

    The first of ``$FOREDRAFT_CACHE``, ``$XDG_CACHE_HOME/foredraft`` and ``~/.cache/foredraft``.
    """
    if own := environment.get("FOREDRAFT_CACHE"):
        return Path(own).expanduser()
    if shared := environment.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "foredraft"
    return Path.home() / ".cache" / "foredraft"


def bytes_below(folder: Path) -> int:
    """Size of the files in a folder, but not of those that links in it lead to."""
    total = 0
    for path in files_below(folder):
        with suppress(OSError):  # another process may move it meanwhile
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def files_below(folder: Path) -> Iterator[Path]:
    """Files in a folder and its folders; those that another process deletes meanwhile are skipped.

    `Path.rglob` raises there, in some versions of Python.
    """
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def mark_used(path: Path) -> None:
    """Note that a cached file is in use, for `remove_unused`."""
    with suppress(OSError):  # it is another user's
        os.utime(path)


def remove_unused(paths: Iterable[Path]) -> None:
    """Delete cached files and folders that have not been used for a month.

    Versions of foredraft share a cache and do not know the names that others use, so the last use
    decides. A process that has such a file open or mapped keeps its content.
    """
    for path in paths:
        with suppress(OSError):  # in use on Windows, or gone
            if time.time() - path.stat().st_mtime > _MONTH_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
