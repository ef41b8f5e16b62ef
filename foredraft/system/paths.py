"""The folder of foredraft's own files."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
