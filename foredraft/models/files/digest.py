"""A digest of all weights of a checkpoint: it tells a model from its fine-tunes."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from pathlib import Path

from foredraft.models.files.kept import KeptFiles
from foredraft.models.files.progress import Progress
from foredraft.models.files.safety import Checkpoint, check_safetensors
from foredraft.models.files.stored import read_blocks

_FOLDER = "weights"
_DIGITS = 32


def weights_digest(checkpoint: Checkpoint, cache: Path, progress: Progress | None = None) -> str:
    """The hexadecimal sha256, cut to 32 digits, of every tensor: name, type, shape and bytes.

    How the tensors are spread over files does not matter. Reading 270 MB takes about half a
    second, so the result is kept and found again while the files have the same sizes and times.

    Args:
        checkpoint: with the weights.
        cache: foredraft's cache, where results are kept.
        progress: receives a report when files are read.

    Raises:
        ModelLoadError: a file of weights is damaged.
    """
    files = checkpoint.weight_files

    def digest() -> str:
        if progress is not None:
            progress.stage("Reading the weights once, to tell them from those of fine-tunes")
        return _digest_of_gguf(checkpoint) if checkpoint.is_gguf else _digest_of(files)

    state = _state_of(files)
    return str(KeptFiles(cache / _FOLDER).json(state, state, digest))


def _state_of(files: Iterable[Path]) -> str:
    """Changes when one of the files is written again."""
    states = [
        (str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files
    ]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:_DIGITS]


def _digest_of_gguf(checkpoint: Checkpoint) -> str:
    """Rows count in their order in transformers, however a file has them."""
    tensors: list[tuple[str, bytes]] = []
    for name, stored in checkpoint.tensors.items():
        digest = hashlib.sha256(f"{name} {stored.dtype} {[*stored.shape]} ".encode())
        digest.update(read_blocks(stored).tobytes())
        tensors.append((name, digest.digest()))
    return _joined(tensors)


def _joined(tensors: list[tuple[str, bytes]]) -> str:
    return hashlib.sha256(b"".join(digest for _, digest in sorted(tensors))).hexdigest()[:_DIGITS]


def _digest_of(files: Iterable[Path]) -> str:
    tensors: list[tuple[str, bytes]] = []
    for path in files:
        entries = check_safetensors(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            first = len(data) - max((e["data_offsets"][1] for e in entries.values()), default=0)
            for name, entry in entries.items():
                start, stop = entry["data_offsets"]
                digest = hashlib.sha256(f"{name} {entry['dtype']} {entry['shape']} ".encode())
                with memoryview(data) as view, view[first + start : first + stop] as content:
                    digest.update(content)
                tensors.append((name, digest.digest()))
    return _joined(tensors)
