"""Files of token ids, which mean other text with another tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.files.safety import check_safetensors
from foredraft.system.files import write_tensors

_FORMS = (1, torch.int32), (1, torch.int64)
SEPARATOR = -1
"""Stands behind every text."""


def write_ids(
    path: Path, kind: str, fingerprint: str, tensors: Mapping[str, Tensor], mode: int = 0o644
) -> None:
    """Replace the file atomically: a reader sees the whole old or the whole new one.

    Args:
        kind: of the file, with its version.
        fingerprint: of the tokenizer that made the ids.
        tensors: ``ids``, each text followed by a separator, and others that go with them.
        mode: who may read and write it.
    """
    write_tensors(path, tensors, {"format": kind, "tokenizer": fingerprint}, mode)


def kind_of(path: Path) -> str | None:
    """The kind that a file of ids names in its metadata; None: it is no such file."""
    try:
        return _opened(path)[0].get("format")
    except ConfigError:
        return None


def _opened(path: Path) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    """A file's metadata and its tensors, memory-mapped.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        check_safetensors(path)
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except (OSError, SafetensorError, ModelLoadError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); delete it and make it anew") from error


def read_ids(
    path: Path,
    kind: str,
    fingerprint: str | None,
    vocab_size: int,
    names: Collection[str] = ("ids",),
) -> dict[str, Tensor]:
    """The tensors that `write_ids` wrote, mapped.

    Args:
        names: of them.
        fingerprint: of the tokenizer in use; None skips the comparison.
        vocab_size: of the target.

    Raises:
        ConfigError: the file is damaged, of another kind or of another tokenizer.
    """
    about, stored = _opened(path)
    if about.get("format") != kind:
        raise ConfigError(f"{path} is no {kind}; delete it or name another")
    forms = {name: (tensor.ndim, tensor.dtype) for name, tensor in stored.items()}
    if forms.keys() != {*names} or not all(form in _FORMS for form in forms.values()):
        raise ConfigError(f"{path} is damaged ({[*forms]} in it); delete it and make it anew")
    if fingerprint is not None and about.get("tokenizer") != fingerprint:
        raise ConfigError(
            f"{path} was written with tokenizer {about.get('tokenizer')} and this model's is "
            f"{fingerprint}: the ids mean other text. Make one for this model"
        )
    low, high = map(int, stored["ids"].aminmax()) if len(stored["ids"]) else (0, 0)
    if not SEPARATOR <= low <= high < vocab_size:
        raise ConfigError(f"{path} holds ids outside the vocabulary of {vocab_size}")
    return stored
