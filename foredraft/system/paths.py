"""The folder of foredraft's own files, and sizes of folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


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
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may move it meanwhile
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total
