"""Models from the Hugging Face hub: data that is parsed, never code and never a pickle."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ConfigError, ForedraftError, ModelLoadError
from foredraft.system.extras import needs_extra

if TYPE_CHECKING:
    from foredraft.models.files.progress import Progress

FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
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


def fetch(name: str, revision: str | None, progress: Progress) -> Path:
    """The hub's own snapshot directory of ``name`` ("org/name"), downloaded if need be.

    Files in the hub's cache are not downloaded again, and serve without a network.

    Raises:
        ConfigError: no such repository or revision, or the hub's client is not installed.
        ModelLoadError: the hub cannot be reached or refuses, or there are no safetensors weights.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as problem:
        raise needs_extra(f"fetching {name!r} from the hub needs", "hf", problem) from None
    progress.stage(f"fetching {name} from the Hugging Face hub")
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(FILES),
            ignore_patterns=list(FILES_LEFT_OUT),
            tqdm_class=_bars_reporting_to(progress),
        )
    except Exception as error:  # the hub client lets errors of its http library through
        raise _explain(name, revision, error) from error
    directory = Path(folder)
    if not any(directory.glob("*.safetensors")):
        raise ModelLoadError(
            f"{name!r} has no *.safetensors weights; other formats are not fetched, because a "
            "pickle can run code when it is read. Look for a safetensors copy on the hub, "
            "or download a GGUF file of it and name that file as the model"
        )
    return directory


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
        case errors.HFValidationError():
            return ConfigError(f"{name!r} is not a valid hub id ('org/name'): {error}")
    reason = _root_cause(error)
    if isinstance(reason, OSError) and reason.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
        return ModelLoadError(
            f"cannot keep {name!r} in the hub's cache: {reason}. Free some space there, or set "
            "HF_HOME to a directory that can be written and has it"
        )
    return ModelLoadError(
        f"cannot fetch {name!r} from the hub: {type(reason).__name__}: {reason}. Check the network "
        "(a proxy is set with HTTPS_PROXY, a mirror with HF_ENDPOINT, HF_HUB_OFFLINE forbids it); "
        f"or run `hf download {name}` elsewhere and give the directory as the model"
    )


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


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
