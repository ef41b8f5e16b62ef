"""Reads the JSON files of a checkpoint and validates their fields."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from foredraft.core.errors import ModelLoadError

_MAX_BYTES = 64 << 20
"""Far above any real one. Read as Python objects, a file takes some ten times its size."""
_SHOWN = 3
"""Problems that a message names."""


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


Fields = TypeVar("Fields", bound=BaseModel)


def read_fields(path: Path, schema: type[Fields]) -> Fields:
    """The fields of a JSON file.

    Raises:
        ModelLoadError: the file cannot be read, or one of the fields cannot be used.
    """
    return parse_fields(path, read_json(path), schema)


def parse_fields(
    path: Path, content: Mapping[str, Any], schema: type[Fields], prefix: str = ""
) -> Fields:
    """The fields of the content of ``path``; see `read_fields`.

    Args:
        prefix: of the keys of all fields.
    """
    found = {key.removeprefix(prefix): content[key] for key in content if key.startswith(prefix)}
    try:
        return schema.model_validate(found, strict=True)
    except ValidationError as error:
        # The same field fails once for each type that it may have.
        problems = {str(one["loc"][:1]): _problem(one, prefix) for one in error.errors()}
    shown = list(problems.values())
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise ModelLoadError(
        f"{path}: {'; '.join(shown[:_SHOWN])}{more}. Correct the file, or download the checkpoint "
        "again"
    )


def _problem(found: Any, prefix: str) -> str:
    field = prefix + ".".join(map(str, found["loc"])) if found["loc"] else ""
    if found["type"] == "missing":
        return f"it does not give {field!r}"
    reason = found["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"{field} is {reprlib.repr(found['input'])}; {reason}" if field else reason
