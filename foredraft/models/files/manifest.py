"""Contents of a directory in the cache: written when it is made, compared when it is used."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST_NAME = "foredraft-manifest.json"
_BLOCK_BYTES = 64 << 10


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_of(content: Any) -> str:
    """A hash of the sums of blocks of 64 KiB as 64-bit integers, at the speed of memory.

    It shows accidents: zeroed pages, flipped bits, blocks in the wrong place. It is no proof
    against forgery, as a sha256 would be at twenty times the cost.

    Args:
        content: bytes, in memory or mapped into it.
    """
    import numpy as np

    numbers = np.frombuffer(content, np.uint8)
    end = len(numbers) // _BLOCK_BYTES * _BLOCK_BYTES
    rest = np.zeros(_BLOCK_BYTES if end < len(numbers) else 0, np.uint8)
    rest[: len(numbers) - end] = numbers[end:]
    blocks = (part.view(np.uint64).reshape(-1, _BLOCK_BYTES // 8) for part in (numbers[:end], rest))
    return hashlib.sha256(b"".join(part.sum(1).tobytes() for part in blocks)).hexdigest()


def sums_of_file(path: Path) -> str:
    """See `sums_of`; of a file without bytes, a hash of nothing."""
    import numpy as np

    return sums_of(np.memmap(path, np.uint8, "r") if path.stat().st_size else b"")


def write_manifest(directory: Path, recipe: str) -> None:
    """Describe every file of ``directory``, and see that it has reached the disk.

    Links are left alone: their targets are not foredraft's.

    Args:
        recipe: names the sources of the files and the version of the code.
    """
    files = [path for path in sorted(directory.iterdir()) if not path.is_symlink()]
    described = {
        path.name: {"bytes": path.stat().st_size, "block_sums": sums_of_file(path)}
        for path in files
    }
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
            path = directory / name
            is_whole = path.stat().st_size == expected["bytes"]
            if not is_whole or sums_of_file(path) != expected["block_sums"]:
                return f"{name} was changed"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"a file is missing or unreadable ({error})"
    return None
