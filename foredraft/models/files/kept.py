"""On-disk cache of derived data, keyed by code and inputs, for a quick start.

It holds weights in the kernel's layout, the measured costs of a forward and tables of a head. Each
piece names its recipe: the code and the inputs that it was made with. A piece of another recipe, a
damaged one or a missing one is made anew. A cache that cannot be written is no error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.models.files.manifest import BLOCK_BYTES, block_sums_of, sums_of_blocks
from foredraft.models.files.safety import Checkpoint
from foredraft.system.paths import bytes_below, cache_root

LEAST_BYTES = 32 << 20
"""Smallest weight files of a cached model: smaller models are prepared faster than cached."""
_FREE_SHARE = 4
"""A piece is stored only if this many times its size is free on the disk."""
_NOTE = "model"
"""The file beside the versions of a model that names the model."""
_LINE = 64
_HUGE_PAGE = 2 << 20
_READ_BYTES = 16 << 20
_READERS = 2
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float32, torch.uint8)}
_WEEK_SECONDS = 7 * 24 * 3600
_LOG = logging.getLogger("foredraft")


def this_week() -> int:
    """The number of the week: in the recipe of a measurement, it has the measurement made anew."""
    return int(time.time() // _WEEK_SECONDS)


@dataclass(frozen=True)
class KeptFiles:
    """The pieces of one model.

    Attributes:
        folder: of the cached data; None caches nothing.
        model: the directory they are made from, which is noted beside them.
    """

    folder: Path | None
    model: Path | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, least_bytes: int = LEAST_BYTES) -> KeptFiles:
        """The pieces of a checkpoint, found by the names, sizes and times of its files.

        A changed file is another model; the pieces of the model that the directory held before
        are deleted.
        """
        files = checkpoint.weight_files
        files += [path for path in checkpoint.directory.glob("*.json") if path.is_file()]
        try:
            states = [(path.name, path.stat()) for path in sorted(files)]
        except OSError:
            return cls(None)
        if sum(state.st_size for _, state in states) < least_bytes:
            return cls(None)
        directory = checkpoint.directory.resolve()
        described = [(name, state.st_size, state.st_mtime_ns) for name, state in states]
        place = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
        version = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
        folder = cache_root() / "kept" / place / version
        if not folder.exists() and folder.parent.exists():
            shutil.rmtree(folder.parent, ignore_errors=True)
        return cls(folder, directory)

    def json(self, name: str, recipe: str, make: Callable[[], Any]) -> Any:
        """A small piece: the result of ``make``, cached."""
        value = self.read_json(name, recipe)
        if value is None:
            value = make()
            self.keep_json(name, recipe, value)
        return value

    def read_json(self, name: str, recipe: str) -> Any:
        """A small piece, or None if there is none of this recipe."""
        if self.folder is None:
            return None
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            return content["value"] if content["recipe"] == recipe else None
        return None

    def keep_json(self, name: str, recipe: str, value: Any) -> None:
        """Write a small piece of values that JSON has."""
        if self.folder is not None:
            path = self.folder / f"{name}.json"
            write = partial(_write_json, path, {"recipe": recipe, "value": value})
            self._try_to_keep(name, write)

    def tensors(self, name: str, recipe: str) -> dict[str, Tensor] | None:
        """The tensors of a piece, in memory of their own; None where there is no whole one.

        They are read into huge pages, with a check of all bytes against the sums that were written
        beside them.
        """
        if self.folder is None:
            return None
        try:
            return _read_tensors(self.folder / name, recipe)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _LOG.info("%s is made anew: the cached data is damaged (%s)", name, error)
            return None

    def keep(
        self,
        name: str,
        recipe: str,
        tensors: Mapping[str, Tensor],
        instead_of: str | None = None,
    ) -> None:
        """Write a piece, and say so. Where that fails, the next start makes it again.

        Args:
            instead_of: a pattern of names: other pieces that it fits are deleted.
        """
        if self.folder is None:
            return
        size = sum(_whole_lines(_num_bytes(each)) for each in tensors.values())
        path = self.folder / name
        if not self._try_to_keep(name, partial(_write_tensors, path, recipe, tensors), size):
            return
        for other in self.folder.glob(instead_of) if instead_of else ():
            if other.name.removesuffix(".index") != name:
                other.unlink(missing_ok=True)
        if size >= LEAST_BYTES:
            _LOG.warning(
                "%.0f MB are kept for quick starts in %s; they may be deleted", size / 1e6, path
            )

    def _try_to_keep(self, name: str, write: Callable[[], None], size: int = 0) -> bool:
        """Returns whether it is kept."""
        try:
            root = cache_root()
            root.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(root).free < _FREE_SHARE * size:
                _LOG.debug("%s is not kept: the disk is nearly full", name)
                return False
            write()
            if self.folder is not None and self.model is not None:
                self._note_model(self.folder.parent / _NOTE)
        except OSError as error:
            _LOG.debug("%s is not kept: %s", name, error)
            return False
        return True

    def _note_model(self, note: Path) -> None:
        """Beside the pieces; with the first one of a model, those of deleted models go."""
        if note.exists():
            return
        note.write_bytes(os.fsencode(str(self.model)))
        for each in kept_models():
            if each.is_gone:
                shutil.rmtree(each.folder, ignore_errors=True)


NOTHING_KEPT = KeptFiles(None)


@dataclass(frozen=True)
class KeptModel:
    """Cached data of one model.

    Attributes:
        folder: of the cached data.
        model: the model's directory; None if it was not noted.
        num_bytes: size of all pieces.
    """

    folder: Path
    model: Path | None
    num_bytes: int

    @property
    def is_gone(self) -> bool:
        """Whether the model is no longer there, or a file that its directory points to."""
        if self.model is None:
            return False
        if not self.model.is_dir():
            return True
        return any(path.is_symlink() and not path.exists() for path in self.model.iterdir())


def kept_models() -> list[KeptModel]:
    """All models with cached data, the largest first."""
    found = []
    for folder in (cache_root() / "kept").glob("*"):
        note, model = folder / _NOTE, None
        with suppress(OSError):
            model = Path(os.fsdecode(note.read_bytes()))
        found.append(KeptModel(folder, model, bytes_below(folder)))
    return sorted(found, key=lambda each: -each.num_bytes)


def recipe_of(*parts: object) -> str:
    """A recipe of a piece's inputs: modules by their source, tensors by their bytes."""
    return hashlib.sha256("\n".join(map(_described, parts)).encode()).hexdigest()[:24]


def _described(part: object) -> str:
    if isinstance(part, ModuleType) and part.__file__:
        return hashlib.sha256(Path(part.__file__).read_bytes()).hexdigest()
    if isinstance(part, Tensor):
        content = hashlib.sha256(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return f"{part.dtype}{[*part.shape]}{content.hexdigest()}"
    return repr(part)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A new file beside ``path``, which takes its place at the end; one that fails is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    try:
        yield Path(unfinished)
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            os.unlink(unfinished)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with _replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content), encoding="utf-8")


def _write_tensors(path: Path, recipe: str, tensors: Mapping[str, Tensor]) -> None:
    """The bytes of the tensors, each at the beginning of a cache line; then their index."""
    index = []
    with _replacing(path) as unfinished:
        with unfinished.open("wb") as file:
            for name, tensor in tensors.items():
                index.append([name, str(tensor.dtype), list(tensor.shape), file.tell()])
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                file.write(bytes(-file.tell() % _LINE))
            size = file.tell()
        sums = block_sums_of(unfinished)
    content = {"recipe": recipe, "bytes": size, "sums": sums, "tensors": index}
    _write_json(path.with_suffix(".index"), content)


def _read_tensors(path: Path, recipe: str) -> dict[str, Tensor] | None:
    index = json.loads(path.with_suffix(".index").read_text(encoding="utf-8"))
    if index["recipe"] != recipe:
        return None
    size = int(index["bytes"])
    if path.stat().st_size != size:
        raise ValueError(f"{path.stat().st_size} bytes instead of {size}")
    places = [
        (str(name), _DTYPES[dtype], tuple(map(int, shape)), int(offset))
        for name, dtype, shape, offset in index["tensors"]
    ]
    for name, dtype, shape, offset in places:
        end = offset + math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or offset < 0 or offset % _LINE or end > size:
            raise ValueError(f"{name} lies outside the file")
    memory, sums = _read_whole(path, size)
    if sums != index["sums"]:
        raise ValueError("its bytes have changed")
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    return {
        name: torch.frombuffer(
            memory, dtype=dtype, count=math.prod(shape), offset=first + offset
        ).view(shape)
        for name, dtype, shape, offset in places
    }


def _read_whole(path: Path, size: int) -> tuple[mmap.mmap, str]:
    """The file in memory that begins at a huge page, and a hash of the sums of its blocks."""
    room = -(-size // BLOCK_BYTES) * BLOCK_BYTES
    memory = mmap.mmap(-1, room + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system may have none
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE
    place = memoryview(memory)[first : first + size]
    with path.open("rb") as file, ThreadPoolExecutor(_READERS) as readers:
        starts = range(0, size, _READ_BYTES)
        pieces = [place[start : start + _READ_BYTES] for start in starts]
        list(readers.map(partial(_read_piece, file.fileno()), pieces, starts))
    sums = sums_of_blocks(memoryview(memory)[first : first + room])
    return memory, hashlib.sha256(sums).hexdigest()


def _read_piece(file: int, piece: memoryview, start: int) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(file, [piece[done:]], start + done)
        if not count:
            raise ValueError("it ends too early")
        done += count


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
