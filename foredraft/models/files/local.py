"""The models that are here: packaged ones, and what foredraft keeps of others, with their sizes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foredraft.core.errors import ConfigError, unknown
from foredraft.models.files.kept import kept_models
from foredraft.models.files.packaged import MODELS
from foredraft.system.paths import cache_root


@dataclass(frozen=True)
class LocalFiles:
    """A folder of one model.

    Attributes:
        model: its name, or the directory that the folder was made from.
        kind: "packaged" (the model itself), "description" (of a GGUF file, whose weights stay where
            they are), "converted" (a GGUF file's weights for transformers) or "layout" (weights as
            the kernels read them, and measured costs).
        folder: may be deleted: it is made or downloaded again when it is needed.
        num_bytes: on the disk; of a packaged model that is not here, of its download.
        is_here: whether the folder exists.
        is_gone: whether the model that it was made from no longer exists.
    """

    model: str
    kind: str
    folder: Path
    num_bytes: int
    is_here: bool = True
    is_gone: bool = False


def local_models() -> list[LocalFiles]:
    """All folders, packaged models first."""
    return [*_packaged(), *_made_of_files(), *_layouts()]


def remove(name: str) -> list[LocalFiles]:
    """Delete every folder of a model; returns those that are deleted.

    Raises:
        ConfigError: nothing of it is here.
    """
    there = [each for each in local_models() if each.is_here]
    found = [each for each in there if name in (each.model, str(each.folder))]
    if not found:
        raise unknown("model that is kept here", name, {each.model for each in there})
    for each in found:
        try:
            shutil.rmtree(each.folder)
        except OSError as error:
            raise ConfigError(f"{each.folder} cannot be deleted: {error}") from error
    return found


def _packaged() -> Iterator[LocalFiles]:
    for name, model in MODELS.items():
        folder = _models() / name
        size = _size(folder) if folder.is_dir() else model.num_bytes
        yield LocalFiles(name, "packaged", folder, size, is_here=folder.is_dir())


def _made_of_files() -> Iterator[LocalFiles]:
    for folder in sorted(_models().glob("[!.]*")):
        if folder.is_dir() and folder.name not in MODELS:
            kind = "description" if folder.name.startswith("gguf-") else "converted"
            yield LocalFiles(folder.name, kind, folder, _size(folder))


def _layouts() -> Iterator[LocalFiles]:
    for kept in kept_models():
        source = kept.model
        own = source is not None and source.parent == _models().resolve()
        name = kept.folder.name if source is None else source.name if own else str(source)
        yield LocalFiles(name, "layout", kept.folder, kept.num_bytes, is_gone=kept.is_gone)


def _models() -> Path:
    return cache_root() / "models"


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            if not path.is_symlink() and path.is_file():  # links lead to the user's own files
                total += path.stat().st_size
    return total
