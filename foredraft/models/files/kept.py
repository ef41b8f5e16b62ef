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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foredraft.models.files.manifest import sums_of, sums_of_file
from foredraft.models.files.safety import Checkpoint
from foredraft.system.files import replacing
from foredraft.system.paths import bytes_below, cache_root, files_below, mark_used, remove_unused

LEAST_BYTES = 32 << 20
"""Smallest weight files of a cached model: smaller models are prepared faster than cached."""
_FREE_SHARE = 4
"""A piece is stored only if this many times its size is free on the disk."""
_NOTE = "model"
"""The file beside the versions of a model that names the model."""
_LINE = 64
_HUGE_PAGE = 2 << 20
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
            path = self.folder / f"{name}.json"
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["recipe"] == recipe:
                mark_used(path)
                return content["value"]
        return None

    def keep_json(self, name: str, recipe: str, value: Any) -> None:
        """Write a small piece of values that JSON has."""
        if self.folder is not None:
            path = self.folder / f"{name}.json"
            write = partial(_write_json, path, {"recipe": recipe, "value": value})
            self._try_to_keep(name, write)

    def tensors(self, name: str, recipe: str) -> dict[str, Tensor] | None:
        """The tensors of a piece, in memory of their own; None where there is no whole one.

        They are read into huge pages, and compared with the sums that were written beside them.
        """
        if self.folder is None:
            return None
        try:
            return _read_tensors(self.folder / name, recipe)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _LOG.info("%s is made anew: the cached data cannot be read (%s)", name, error)
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
        size = sum(tensor.nbytes for tensor in tensors.values())
        path = self.folder / name
        if not self._try_to_keep(name, partial(_write_tensors, path, recipe, tensors), size):
            return
        for other in self.folder.glob(instead_of) if instead_of else ():
            if other.name.removesuffix(".index") != name:
                other.unlink(missing_ok=True)
        remove_unused(_pieces())
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
        model: the model's directory; None if it was not noted.
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


def _pieces() -> Iterator[Path]:
    """Files that go once they are old: tensors only after their index, whose time is their use's.

    A time set on a large file of a container's image would copy all of it. Of the folder of an
    earlier version only its own files: others may be a user's.
    """
    files = files_below(cache_root() / "kept")
    for path in sorted(files, key=lambda path: path.suffix != ".index"):
        index = path.with_suffix(".index")
        if path.name != _NOTE and (path == index or not index.exists()):
            yield path
    yield from (cache_root() / "weights").glob("[0-9a-f]" * 32 + ".json")


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


def _write(path: Path, pieces: Iterable[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.writelines(pieces)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write(path, [json.dumps(content).encode()])


def _write_tensors(path: Path, recipe: str, tensors: Mapping[str, Tensor]) -> None:
    """The bytes of the tensors, each at the beginning of a cache line; then their index."""
    index, size = list[tuple[str, str, list[int], int]](), 0
    for name, tensor in tensors.items():
        index.append((name, str(tensor.dtype), list(tensor.shape), size))
        size += _whole_lines(tensor.nbytes)
    _write(path, chain.from_iterable(map(_lines, tensors.values())))
    content = {"recipe": recipe, "bytes": size, "sums": sums_of_file(path), "tensors": index}
    _write_json(path.with_suffix(".index"), content)


def _lines(tensor: Tensor) -> Iterator[Any]:
    yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    yield bytes(_whole_lines(tensor.nbytes) - tensor.nbytes)


def _read_tensors(path: Path, recipe: str) -> dict[str, Tensor] | None:
    index = json.loads(path.with_suffix(".index").read_text(encoding="utf-8"))
    if index["recipe"] != recipe:
        return None
    mark_used(path.with_suffix(".index"))
    size = int(index["bytes"])
    if path.stat().st_size != size:
        raise ValueError(f"{path.stat().st_size} bytes instead of {size}")
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system may have none
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    content = memoryview(memory)[first : first + size]
    with path.open("rb") as file:
        file.readinto(content)
    if sums_of(content) != index["sums"]:
        raise ValueError("its bytes have changed")
    return {
        name: torch.frombuffer(
            memory, dtype=_DTYPES[dtype], count=math.prod(shape), offset=first + offset
        ).view(shape)
        for name, dtype, shape, offset in index["tensors"]
    }


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
