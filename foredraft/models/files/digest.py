"""A digest of all weights of a checkpoint: it tells a model from its fine-tunes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from foredraft.models.files.progress import Progress
from foredraft.models.files.safety import Checkpoint, check_safetensors
from foredraft.models.files.stored import read_blocks
from foredraft.models.files.tensors import StoredTensor

_DIGITS = 32


def weights_digest(checkpoint: Checkpoint, progress: Progress | None = None) -> str:
    """The hexadecimal sha256, cut to 32 digits, of every tensor: name, type, shape and bytes.

    How the tensors are spread over files does not matter, and rows of a GGUF file count in their
    order in transformers. Reading 270 MB takes about half a second.

    Raises:
        ModelLoadError: a file of weights is damaged.
    """
    if progress is not None:
        progress.stage("Reading the weights once, to tell them from those of fine-tunes")
    digests = {
        name: _of_tensor(name, stored, read_blocks(stored).tobytes())
        for name, stored in checkpoint.tensors.items()
        if stored.gguf
    }
    for path in checkpoint.weight_files:
        if path.suffix == ".safetensors":  # of the model, or of an adapter
            digests |= _of_file(path)
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()[:_DIGITS]


def _of_file(path: Path) -> dict[str, bytes]:
    with safe_open(str(path), framework="pt") as file:
        return {
            name: _of_tensor(
                name, stored, file.get_tensor(name).reshape(-1).view(torch.uint8).numpy()
            )
            for name, stored in check_safetensors(path).items()
        }


def _of_tensor(name: str, stored: StoredTensor, content: Any) -> bytes:
    digest = hashlib.sha256(f"{name} {stored.dtype} {[*stored.shape]} ".encode())
    digest.update(content)
    return digest.digest()
