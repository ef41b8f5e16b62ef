"""Contents of a directory in the cache: written when it is made, compared when it is used."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

MANIFEST_NAME = "foredraft-manifest.json"


def sha256_of(path: Path) -> str:
    """The hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, recipe: str) -> None:
    """Describe every file of ``directory``, and see that it has reached the disk.

    Links are left alone: their targets are not foredraft's.

    Args:
        recipe: names the sources of the files and the version of the code.
    """
    files = [path for path in sorted(directory.iterdir()) if not path.is_symlink()]
    described = {path.name: {"bytes": path.stat().st_size} for path in files}
    manifest = directory / MANIFEST_NAME
    content = {"recipe": recipe, "files": described}
    manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in (*files, manifest):
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def find_damage(directory: Path, recipe: str) -> str | None:
    """The fault of ``directory`` in a few words, or None when it is whole and current."""
    try:
        content = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
        if content["recipe"] != recipe:
            return "another version of foredraft wrote it"
        for name, expected in content["files"].items():
            if (directory / name).stat().st_size != expected["bytes"]:
                return f"{name} was changed"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"a file is missing or unreadable ({error})"
    return None
