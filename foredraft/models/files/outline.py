"""A model of the hub before its weights are here: the headers of its files, and holes behind them.

The files of an outline are as long as the whole ones and take no disk space for their weights, so a
model is planned from its outline as from itself. Outlines are never loaded: `resolve_model` gives
one only where it is asked for no weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from foredraft.core.errors import ModelLoadError
from foredraft.models.files import gguf_checkpoint
from foredraft.models.files.gguf import GgufFile, num_header_bytes
from foredraft.models.files.progress import Progress
from foredraft.system.paths import cache_root

_FIRST_BYTES = 1 << 20
"""Asked for at once. Most headers are shorter; those of GGUF files hold the vocabulary."""
_MOST_BYTES = 128 << 20
_LENGTH_BYTES = 8
_FOLDER = "headers"


def is_outline(directory: Path) -> bool:
    """Whether a directory holds no weights but only room for them."""
    return cache_root() / _FOLDER in directory.parents


def write_outline(
    name: str,
    revision: str | None,
    weights: Mapping[str, int],
    others: Sequence[Path],
    progress: Progress,
) -> Path:
    """The directory of an outline, made anew.

    Args:
        name: "org/name".
        weights: safetensors files of the repository, or the parts of a GGUF file, with their sizes.
        others: files beside the weights, which are here.

    Raises:
        ModelLoadError: a header is damaged, or too long to be one.
        Exception: of the hub's client.
    """
    progress.stage(f"reading the headers of {name}")
    folder = cache_root() / _FOLDER / name.replace("/", "--")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in others:
        (folder / path.name).symlink_to(path.resolve())
    found = [folder / Path(file).name for file in weights]
    for number, (file, size) in enumerate(weights.items()):
        _write_header(name, revision, file, size, found[number])
        progress.advance((number + 1) / len(found))
    if found[0].suffix != ".gguf":
        return folder
    described = folder / "described"
    described.mkdir()
    gguf_checkpoint.write_index(found, described, progress)
    return described


def _write_header(name: str, revision: str | None, file: str, size: int, path: Path) -> None:
    """The header of a file, and a hole as long as its weights."""
    start = _read_range(name, revision, file, 0, min(_FIRST_BYTES, size))
    while (end := _header_end(path, start)) is None:
        if len(start) == size or len(start) > _MOST_BYTES:
            raise ModelLoadError(f"the header of {file} of {name} does not end; it is damaged")
        start += _read_range(name, revision, file, len(start), min(2 * len(start), size))
    start += _read_range(name, revision, file, len(start), min(end, size))
    path.write_bytes(start)
    with path.open("r+b") as opened:
        opened.truncate(size)
        if path.suffix == ".gguf":
            for tensor in GgufFile(path).tensors.values():
                if tensor.name.startswith("rope_"):  # numbers that belong to the description
                    last = tensor.start + tensor.num_bytes
                    opened.seek(tensor.start)
                    opened.write(_read_range(name, revision, file, tensor.start, last))


def _header_end(path: Path, start: bytes) -> int | None:
    """Length of the header of a file that starts so; None: more bytes are needed."""
    if path.suffix == ".gguf":
        return num_header_bytes(path, start)
    return _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")


def _read_range(name: str, revision: str | None, file: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file of the hub."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined, unused-ignore]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    if start >= end:
        return b""
    headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}"}
    url, found = hf_hub_url(name, file, revision=revision), b""
    with http_stream_backoff("GET", url, headers=headers) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        skipped = start if response.status_code == 200 else 0  # ranges are not heeded
        for piece in response.iter_bytes():
            found += piece
            if len(found) >= skipped + end - start:
                break
    if len(found) < skipped + end - start:
        raise ModelLoadError(f"{file} of {name} is shorter than the hub says; ask again")
    return found[skipped : skipped + end - start]
