"""The models that are here: packaged ones, those of the hub's cache, and what is kept of them."""

from __future__ import annotations

import filecmp
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foredraft.core.errors import ConfigError, ModelLoadError, unknown
from foredraft.models.files.hub import HUB_FOLDER, hub_cache
from foredraft.models.files.kept import kept_models
from foredraft.models.files.packaged import MODELS
from foredraft.models.files.safety import Checkpoint
from foredraft.system.paths import bytes_below, cache_root


@dataclass(frozen=True)
class LocalFiles:
    """A folder of one model.

    Attributes:
        model: its name, or the directory that the folder was made from.
        kind: "packaged" or "hub" (the model itself), "description" (of a GGUF file, whose weights
            stay where they are), "converted" (a GGUF file's weights for transformers) or "layout"
            (weights as the kernels read them, and measured costs).
        folder: may be deleted: it is made or downloaded again when it is needed.
        num_bytes: on the disk; of a packaged model that is not here, of its download.
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
    return [*_packaged(), *_of_the_hub(), *_made_of_files(), *_layouts()]


def remove(name: str) -> list[LocalFiles]:
    """Delete every folder of a model; returns those that are deleted.

    A model of the hub goes with all its files, and with the descriptions that were made of them.

    Raises:
        ConfigError: nothing of it is here.
    """
    there = [each for each in local_models() if each.is_here]
    found = [each for each in there if name in (each.model, str(each.folder))]
    if not found:
        raise unknown("model that is kept here", name, {each.model for each in there})
    hub = [each.folder.resolve() for each in found if each.kind == "hub"]
    found += [
        each
        for each in there
        if each not in found and (source := _source_of(each.folder)) is not None
        if any(folder in source.parents for folder in hub)
    ]
    for each in found:
        try:
            shutil.rmtree(each.folder)
        except OSError as error:
            raise ConfigError(f"{each.folder} cannot be deleted: {error}") from error
    return found


def _packaged() -> Iterator[LocalFiles]:
    for name, model in MODELS.items():
        folder = _models() / name
        size = bytes_below(folder) if folder.is_dir() else model.num_bytes
        yield LocalFiles(name, "packaged", folder, size, is_here=folder.is_dir())


def _of_the_hub() -> Iterator[LocalFiles]:
    for folder in sorted(hub_cache().glob(f"{HUB_FOLDER}*")):
        if any(_is_model(snapshot) for snapshot in folder.glob("snapshots/*")):
            yield LocalFiles(_hub_id(folder), "hub", folder, bytes_below(folder))


def _is_model(snapshot: Path) -> bool:
    return any(snapshot.rglob("*.gguf")) or (
        (snapshot / "config.json").is_file()
        and (snapshot / "tokenizer.json").is_file()
        and any(snapshot.glob("*.safetensors"))
    )


def _hub_id(folder: Path) -> str:
    return folder.name.removeprefix(HUB_FOLDER).replace("--", "/")


def _source_of(folder: Path) -> Path | None:
    """The GGUF file that a description was made of."""
    link = folder / "model-00001.gguf"
    return link.resolve() if link.is_symlink() else None


# ------------------------------------------------------------------------------------ draft models


def draft_models_for(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """Models that are here, have the same tokenizer and at most half the weights.

    Returns:
        Names to type and numbers of weights, the smallest first.
    """
    tokenizer = checkpoint.directory / "tokenizer.json"
    found: dict[str, int] = {}
    for name, directory in _ready():
        theirs = directory / "tokenizer.json"
        if not (tokenizer.is_file() and theirs.is_file()) or directory == checkpoint.directory:
            continue
        if not filecmp.cmp(tokenizer, theirs, shallow=False):
            continue
        with suppress(ModelLoadError):
            size = Checkpoint(directory).num_parameters
            if 2 * size <= checkpoint.num_parameters:
                found[name] = size
    return sorted(found.items(), key=lambda each: each[1])


def _ready() -> Iterator[tuple[str, Path]]:
    """Names and directories of models whose weights are here."""
    for folder in sorted(_models().glob("[!.]*")):
        source = _source_of(folder)
        if source is None:
            yield folder.name, folder
        elif source.is_file():
            yield _name_of_file(source), folder
    for folder in sorted(hub_cache().glob(f"{HUB_FOLDER}*")):
        for snapshot in folder.glob("snapshots/*"):
            if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
                yield _hub_id(folder), snapshot


def _name_of_file(gguf: Path) -> str:
    """The name that loads a GGUF file: its path, or a shorter one if packaged or of the hub."""
    if gguf.parent.parent == _models().resolve() and gguf.parent.name in MODELS:
        return gguf.parent.name
    repository = gguf.parent.parent
    if not repository.name.startswith(HUB_FOLDER):
        return str(gguf)
    names = [link.stem for link in repository.rglob("*.gguf") if link.resolve() == gguf]
    form = re.search(r"[-.]([A-Za-z0-9_]+?)(-\d{5}-of-\d{5})?$", names[0]) if names else None
    return _hub_id(repository) + (f":{form[1]}" if form else "")


# ------------------------------------------------------------------------------------- the folders


def _made_of_files() -> Iterator[LocalFiles]:
    for folder in sorted(_models().glob("[!.]*")):
        if folder.is_dir() and folder.name not in MODELS:
            kind = "description" if folder.name.startswith("gguf-") else "converted"
            source = _source_of(folder)
            is_gone = source is not None and not source.exists()
            yield LocalFiles(folder.name, kind, folder, bytes_below(folder), is_gone=is_gone)


def _layouts() -> Iterator[LocalFiles]:
    for kept in kept_models():
        source = kept.model
        own = source is not None and source.parent == _models().resolve()
        name = kept.folder.name if source is None else source.name if own else str(source)
        yield LocalFiles(name, "layout", kept.folder, kept.num_bytes, is_gone=kept.is_gone)


def _models() -> Path:
    return cache_root() / "models"
