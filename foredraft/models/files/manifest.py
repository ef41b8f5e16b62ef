"""Contents of a directory in the cache: written when it is made, checked when it is used."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

MANIFEST_NAME = "foredraft-manifest.json"

_SMALL_BYTES = 8 << 20
"""Files up to this size are compared by sha256, larger ones by their block sums."""
BLOCK_BYTES = 64 << 10
_READ_BYTES = 4 << 20
_READERS = 2


def sha256_of(path: Path) -> str:
    """The hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def block_sums_of(path: Path) -> str:
    """A hash of the sums of a file's blocks, which costs little more than reading the file.

    See `sums_of_blocks`.
    """
    size = path.stat().st_size
    share = max(1, -(-size // (_READERS * _READ_BYTES))) * _READ_BYTES
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_READERS) as readers:
        for sums in readers.map(partial(_sums_between, path, share), range(0, size, share)):
            digest.update(sums)
    return digest.hexdigest()


def _sums_between(path: Path, share: int, start: int) -> bytes:
    """The sums of the blocks that lie in ``share`` bytes from ``start``."""
    buffer, sums = bytearray(_READ_BYTES), []
    with path.open("rb") as file:
        file.seek(start)
        while file.tell() < start + share and (num_bytes := file.readinto(buffer)):
            end = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
            buffer[num_bytes:end] = bytes(end - num_bytes)
            sums.append(sums_of_blocks(memoryview(buffer)[:end]))
    return b"".join(sums)


def sums_of_blocks(content: Any) -> bytes:
    """Each block of 64 KiB added up as 64-bit integers; the last one is filled up with zeros.

    A hash of them detects accidental damage (zeroed pages, flipped bits, blocks in the wrong
    place) at the speed of memory. It does not detect a deliberate forgery, as a sha256 would at
    eight times the cost.
    """
    import numpy as np

    blocks = np.frombuffer(content, np.uint64).reshape(-1, BLOCK_BYTES // 8)
    sums: bytes = blocks.sum(axis=1, dtype=np.uint64).tobytes()
    return sums


def write_manifest(directory: Path, recipe: str) -> None:
    """Describe every file of ``directory``, and see that it has reached the disk.

    Links are left alone: their targets are not foredraft's.

    Args:
        recipe: names the sources of the files and the version of the code.
    """
    files = {}
    for path in sorted(path for path in directory.iterdir() if not path.is_symlink()):
        _flush_to_disk(path)
        files[path.name] = {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
            "block_sums": block_sums_of(path),
        }
    manifest = directory / MANIFEST_NAME
    content = {"recipe": recipe, "files": files}
    manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _flush_to_disk(manifest)


def find_damage(directory: Path, recipe: str) -> str | None:
    """The fault of ``directory`` in a few words, or None when it is whole and current."""
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
        # Manifests of the first version have no block sums.
        if num_bytes > _SMALL_BYTES and "block_sums" in expected:
            changed = block_sums_of(path) != expected["block_sums"]
        else:
            changed = sha256_of(path) != expected["sha256"]
    except FileNotFoundError:
        return f"{path.name} is missing"
    except (OSError, TypeError, KeyError):
        return f"{path.name} is unreadable"
    return f"{path.name} was changed" if changed else None


def _flush_to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
