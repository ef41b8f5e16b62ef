"""What a directory in the cache must hold: written when it is made, checked when it is used."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST_NAME = "foredraft-manifest.json"

# Hashed at every check. Larger files are checked by size, and by the loader as it reads them:
# hashing the weights would cost more than loading them.
_HASHED_UP_TO_BYTES = 8 << 20


def sha256_of(path: Path) -> str:
    """The hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, recipe: str) -> None:
    """Describe every file of ``directory``, and see that it has reached the disk.

    Args:
        recipe: says what the files were made from and by which version of the code.
    """
    files = {}
    for path in sorted(directory.iterdir()):
        _flush_to_disk(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest = directory / MANIFEST_NAME
    content = {"recipe": recipe, "files": files}
    manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _flush_to_disk(manifest)


def find_damage(directory: Path, recipe: str) -> str | None:
    """What is wrong with ``directory`` in a few words, or None when it is whole and current."""
    try:
        content = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
        written_by, files = content["recipe"], dict(content["files"])
    except FileNotFoundError:
        return "its manifest is missing"
    except (OSError, ValueError, TypeError, KeyError):
        return "its manifest is unreadable"
    if written_by != recipe:
        return "another version of foredraft wrote it"
    for name, expected in files.items():
        if (damage := _damage_of(directory / name, expected)) is not None:
            return damage
    return None


def _damage_of(path: Path, expected: Any) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected["bytes"]:
            return f"{path.name} has {num_bytes} bytes instead of {expected['bytes']}"
        if num_bytes <= _HASHED_UP_TO_BYTES and sha256_of(path) != expected["sha256"]:
            return f"{path.name} was changed"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except (OSError, TypeError, KeyError):
        return f"{path.name} is unreadable"
    return None


def _flush_to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
