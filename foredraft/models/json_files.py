"""The JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.core.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """The object that ``path`` holds.

    Raises:
        ModelLoadError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{path} cannot be read: {error}. Download the checkpoint again"
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__} and not a JSON object")
    return content
