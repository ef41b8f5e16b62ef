"""Models from the Hugging Face hub: data that is parsed, never code and never a pickle."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.cache.memory import check_fits
from foredraft.core.errors import ConfigError, ForedraftError, ModelLoadError
from foredraft.models.files.outline import write_outline

if TYPE_CHECKING:
    from foredraft.models.files.progress import Progress

FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Folders hold other formats; "consolidated" is Mistral's second copy of the same weights.
FILES_LEFT_OUT = ("*/*", "consolidated*.safetensors")
HUB_FOLDER = "models--"
"""Prefix of the names of models' folders in the hub's cache."""
_PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")
"""Forms of GGUF files that are taken where none is named."""
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)


def outlined(name: str, revision: str | None, progress: Progress, form: str | None = None) -> Path:
    """As `fetch` gives it where the weights are here; else an outline of the model.

    Raises:
        ConfigError, ModelLoadError: see `fetch`.
    """
    sizes = _sizes(name, revision)
    weights = [file for file in sizes if file.endswith(".safetensors") and "/" not in file]
    weights = [file for file in weights if not file.startswith("consolidated")]
    if form is not None or not weights:
        weights = _chosen(name, _ggufs(sizes), form)
    here = _snapshot_here(name, revision)
    if here is not None and all((here / file).exists() for file in weights):
        return fetch(name, revision, progress, form)
    others: list[Path] = []
    if weights[0].endswith(".safetensors"):
        left_out = (*FILES_LEFT_OUT, "*.safetensors")
        others = [*_snapshot(name, revision, progress, FILES, left_out).glob("*")]
        others = [path for path in others if path.suffix != ".safetensors" and path.is_file()]
    try:
        chosen = {file: sizes[file] for file in weights}
        return write_outline(name, revision, chosen, others, progress)
    except ForedraftError:
        raise
    except Exception as error:
        raise _explain(name, revision, error) from error


def fetch(name: str, revision: str | None, progress: Progress, form: str | None = None) -> Path:
    """The hub's own snapshot directory of a repository, or a GGUF file in it.

    They are downloaded if need be: files in the hub's cache are not downloaded again, and serve
    without a network. Downloads that were cut go on where they stopped.

    Args:
        name: "org/name".
        form: of the GGUF file, such as "Q4_K_M"; None: safetensors, or where there are none the
            first of `_PREFERRED` that is there.

    Raises:
        ConfigError: no such repository, revision or file, or this machine cannot hold the model.
        ModelLoadError: the hub cannot be reached or refuses, or there are no weights to be read.
    """
    if form is not None:
        return _fetch_gguf(name, revision, progress, form)
    directory = _snapshot(name, revision, progress, FILES, FILES_LEFT_OUT)
    if any(directory.glob("*.safetensors")):
        return directory
    return _fetch_gguf(name, revision, progress, None)


def _snapshot(
    name: str,
    revision: str | None,
    progress: Progress,
    files: Sequence[str],
    left_out: Sequence[str] = (),
) -> Path:
    from huggingface_hub import snapshot_download

    progress.stage(f"fetching {name} from the Hugging Face hub")
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=list(left_out),
            tqdm_class=_bars_reporting_to(progress),
        )
    except Exception as error:  # the hub client lets errors of its http library through
        raise _explain(name, revision, error) from error
    return Path(folder)


def _fetch_gguf(name: str, revision: str | None, progress: Progress, form: str | None) -> Path:
    """The first part of a GGUF file, with the others beside it."""
    sizes = _ggufs(_sizes(name, revision))
    files = _chosen(name, sizes, form)
    if num_bytes := sum(sizes[file] for file in files):  # before the download, not after it
        check_fits(f"{name} ({Path(files[0]).name})", num_bytes, 0)
    return _snapshot(name, revision, progress, [escape(file) for file in files]) / files[0]


def _sizes(name: str, revision: str | None) -> dict[str, int]:
    """The files of a repository with their bytes; without a network those that are cached."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        found = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    except Exception as error:
        here = _snapshot_here(name, revision)
        if here is None:
            raise _explain(name, revision, error) from error
        paths = [path for path in here.rglob("*") if path.is_file()]
        found = {path.relative_to(here).as_posix(): path.stat().st_size for path in paths}
    return dict(sorted(found.items()))


def _ggufs(sizes: Mapping[str, int]) -> dict[str, int]:
    return {
        file: size
        for file, size in sizes.items()
        if file.lower().endswith(".gguf") and not Path(file).name.startswith("mmproj")
    }


def hub_cache() -> Path:
    """The hub's own cache, which has a folder for each repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _snapshot_here(name: str, revision: str | None) -> Path | None:
    """A repository's files in the hub's cache, of which some may be missing."""
    folder = hub_cache() / f"{HUB_FOLDER}{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or "main"
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def _chosen(name: str, files: Iterable[str], form: str | None) -> list[str]:
    """The parts of the file of one form."""
    sets: dict[str, list[str]] = {}
    for file in files:
        sets.setdefault(_PART.sub("", file), []).append(file)
    if not sets:
        raise ModelLoadError(
            f"{name!r} has neither *.safetensors weights nor GGUF files; other formats are not "
            "fetched, because a pickle can run code when it is read. Look for a copy of it on the "
            "hub"
        )
    for wanted in [form] if form else _PREFERRED:
        mark = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?=[-._/]|$)", re.IGNORECASE)
        found = [parts for stem, parts in sets.items() if mark.search(stem.removesuffix(".gguf"))]
        if len(found) == 1:
            return found[0]
        if found:
            break
    if form is None and len(sets) == 1:
        return next(iter(sets.values()))
    there = ", ".join(Path(stem).name.removesuffix(".gguf") for stem in sets)
    asked = f"GGUF file {form!r}" if form else f"one GGUF file of {', '.join(_PREFERRED)}"
    raise ConfigError(f"{name!r} has not {asked}; there are: {there}. Name one as {name}:FORM")


def _explain(name: str, revision: str | None, error: Exception) -> ForedraftError:
    from huggingface_hub import errors

    page = f"https://huggingface.co/{name}"
    match error:
        case errors.GatedRepoError():
            return ModelLoadError(
                f"{name!r} is gated: accept its terms at {page}, then log in with `hf auth login`"
            )
        case errors.RepositoryNotFoundError():
            return ConfigError(
                f"the hub has no model {name!r}, or it is private, and there is no such directory. "
                f"Check the spelling at {page}; for a private model log in with `hf auth login`"
            )
        case errors.RevisionNotFoundError():
            return ConfigError(f"{name!r} has no revision {revision!r}; see {page}/tree/main")
    while error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    return ModelLoadError(
        f"cannot fetch {name!r} from the hub: {type(error).__name__}: {error}. Check the network "
        "(a proxy is set with HTTPS_PROXY, a mirror with HF_ENDPOINT, HF_HUB_OFFLINE forbids it) "
        f"and the space in HF_HOME; or run `hf download {name}` elsewhere and give the directory "
        "as the model"
    )


def _bars_reporting_to(progress: Progress) -> type[Any]:
    """A stand-in for the hub's progress bars that draws nothing and reports the bytes instead."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"file": io.StringIO(), "disable": False}))

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.unit == "B" and self.total:
                progress.advance(min(1.0, self.n / self.total))

    return Bar
