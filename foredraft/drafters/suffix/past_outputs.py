"""Outputs of earlier requests, kept for later ones: bounded, and saved without code in the file.

Two generations of suffix automata: outputs enter the young one; when it is full, the old one is
dropped and the young one takes its place. So memory is bounded, what was repeated lately is still
there, and nothing ever has to be removed from an automaton.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from foredraft.core.errors import ConfigError
from foredraft.drafters.suffix.automaton import SEPARATOR, SuffixAutomaton

_FORMAT = "foredraft-past-outputs-1"


class PastOutputs:
    """What earlier requests of one tenant produced.

    Args:
        max_tokens: most tokens kept, over both generations.
        path: the file they are kept in between processes; None keeps them in memory only.
        fingerprint: of the tokenizer whose ids they are.
        vocab_size: ids must lie below it.

    Raises:
        ConfigError: the file holds something else, or its folder cannot be written.
    """

    def __init__(
        self, max_tokens: int, path: Path | None, fingerprint: str, vocab_size: int
    ) -> None:
        self._max_tokens = max_tokens
        self._path, self._fingerprint = path, fingerprint
        self._texts: list[list[int]] = [[], []]  # old, young; outputs end in a separator
        self._automata = [SuffixAutomaton(), SuffixAutomaton()]
        if path is not None:
            _check_writable(path.parent)
        if path is not None and path.exists():
            self._append(_read(path, fingerprint, vocab_size))

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        """The young generation, then the old one; replaced when one is dropped."""
        return (self._automata[1], self._automata[0])

    def __len__(self) -> int:
        """Tokens kept."""
        return sum(map(len, self._texts))

    def add(self, output: Sequence[int]) -> None:
        """Remember one output, and save."""
        if not output:
            return
        self._append([*output, SEPARATOR])
        if self._path is not None:
            _write(self._path, [*self._texts[0], *self._texts[1]], self._fingerprint)

    def _append(self, text: Sequence[int]) -> None:
        half = max(1, self._max_tokens // 2)
        for token in text[-self._max_tokens :]:
            if len(self._texts[1]) >= half:
                self._texts = [self._texts[1], []]
                self._automata = [self._automata[1], SuffixAutomaton()]
            self._texts[1].append(token)
            self._automata[1].extend(token)


def tenant_file(directory: Path, tenant: str) -> Path:
    """Where a tenant's outputs are kept. The name says nothing about the tenant."""
    digest = hashlib.sha256(tenant.encode()).hexdigest()[:32]
    return directory / f"past-outputs-{digest}.safetensors"


def _check_writable(directory: Path) -> None:
    """Find out before anything is generated whether outputs can be kept there."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"shared_dir {directory} cannot be written ({error}); choose another folder"
        ) from error


def _read(path: Path, fingerprint: str, vocab_size: int) -> list[int]:
    try:
        with safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
            tokens = file.get_tensor("tokens")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); delete it to start without past outputs"
        ) from error
    if metadata.get("format") != _FORMAT or tokens.ndim != 1 or tokens.dtype != np.int32:
        raise ConfigError(f"{path} does not hold past outputs; delete it or choose another folder")
    if metadata.get("tokenizer") != fingerprint:
        raise ConfigError(
            f"{path} was written with tokenizer {metadata.get('tokenizer')} and this model's is "
            f"{fingerprint}: the ids mean other text. Choose another folder for this model"
        )
    if tokens.size and not SEPARATOR <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ConfigError(f"{path} holds ids outside the vocabulary of {vocab_size}; delete it")
    return [int(token) for token in tokens]


def _write(path: Path, tokens: Sequence[int], fingerprint: str) -> None:
    """Replace the file at once: whoever reads sees the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")  # readable by us alone
    os.close(handle)
    try:
        save_file(
            {"tokens": np.asarray(tokens, dtype=np.int32)},
            temporary,
            metadata={"format": _FORMAT, "tokenizer": fingerprint},
        )
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
