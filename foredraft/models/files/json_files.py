"""The JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.core.errors import ModelLoadError

_MAX_BYTES = 64 << 20
"""Far above any real one. Read as Python objects, a file takes some ten times its size."""


def read_json(path: Path) -> dict[str, Any]:
    """The object that ``path`` holds.

    Raises:
        ModelLoadError: the file cannot be read, is absurdly large, or holds something else.
    """
    try:
        if (num_bytes := path.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, and {_MAX_BYTES} at most are read")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{path} cannot be read: {error}. Download the checkpoint again"
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__} and not a JSON object")
    return content
