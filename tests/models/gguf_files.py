"""GGUF files for tests, written by hand: whatever a field should say, it says."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAYOUTS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_LAYOUTS[12] = "d"
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Typed:
    """A value of metadata with the number of its type.

    Attributes:
        item: of an array the type of what it holds.
        count: of an array how many it claims to hold; None: as many as it does.
    """

    kind: int
    value: Any
    item: int = 0
    count: int | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor; ``dimensions`` innermost first, as files have them.

    Attributes:
        offset: None: behind the tensor before it.
    """

    kind: int
    dimensions: Sequence[int]
    content: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def typed(value: Any) -> Typed:
    """A value with the type that files usually have for it."""
    match value:
        case Typed():
            return value
        case bool():
            return Typed(7, value)
        case int():
            return Typed(4, value)
        case float():
            return Typed(6, value)
        case str():
            return Typed(STRING, value)
        case [str(), *_]:
            return Typed(ARRAY, value, STRING)
        case _:
            return Typed(ARRAY, value, 5)


def _value(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(f"<{_LAYOUTS[kind]}", value)


def entry(key: str, value: Any) -> bytes:
    """One entry of the metadata."""
    found = typed(value)
    head = text(key) + struct.pack("<I", found.kind)
    if found.kind != ARRAY:
        return head + _value(found.kind, found.value)
    count = len(found.value) if found.count is None else found.count
    items = b"".join(_value(found.item, item) for item in found.value)
    return head + struct.pack("<IQ", found.item, count) + items


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, Stored]] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    """A whole file. The counts are what it claims; None: what is so."""
    infos, data = b"", b""
    for name, tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        infos += text(name) + struct.pack("<I", len(tensor.dimensions))
        infos += struct.pack(f"<{len(tensor.dimensions)}Q", *tensor.dimensions)
        infos += struct.pack("<IQ", tensor.kind, offset)
        data += tensor.content
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(metadata) if num_entries is None else num_entries,
    )
    header = magic + struct.pack("<IQQ", version, *counts)
    header += b"".join(entry(key, value) for key, value in metadata.items()) + infos
    return header + bytes(-len(header) % alignment) + data


def write_gguf(path: Path, *args: Any, **options: Any) -> Path:
    """See `gguf_bytes`."""
    path.write_bytes(gguf_bytes(*args, **options))
    return path
