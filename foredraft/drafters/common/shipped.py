"""Trained heads that come with the package, each found by the target that it belongs to."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from foredraft.drafters.common.head_folder import META, fingerprint, identify
from foredraft.models.base import Target
from foredraft.models.files.safety import Checkpoint

SHIPPED = Path(__file__).parents[2] / "heads"
_EMBEDDINGS = "model.embed_tokens.weight"


def shipped_head(kind: str, target: Target, shipped: Path = SHIPPED) -> Path | None:
    """The directory of a head of this kind for this very target; None: there is none.

    Args:
        shipped: where heads are looked for.
    """
    if not target.capabilities.parts:
        return None
    return _of_fingerprint(kind, identify(target).fingerprint, shipped)


def shipped_head_of_files(
    kind: str, checkpoint: Checkpoint, shipped: Path = SHIPPED
) -> Path | None:
    """The same, told from the target's files: reads a few rows of its embeddings."""
    found = fingerprint_of_files(checkpoint)
    return None if found is None else _of_fingerprint(kind, found, shipped)


def fingerprint_of_files(checkpoint: Checkpoint) -> str | None:
    """As `identify` would have it of the loaded target; None: there are no embeddings."""
    stored = checkpoint.tensors.get(_EMBEDDINGS)
    if stored is None or len(stored.shape) != 2:
        return None
    with safe_open(str(stored.file), framework="pt") as file:
        rows = file.get_slice(_EMBEDDINGS)
        sizes = (*stored.shape, int(checkpoint.config.get("num_hidden_layers", 0)))
        return fingerprint(sizes, lambda ids: torch.cat([rows[i : i + 1] for i in ids.tolist()]))


def _of_fingerprint(kind: str, fingerprint: str, shipped: Path) -> Path | None:
    for path in sorted(shipped.glob(f"*/*/{META}")):
        said = json.loads(path.read_text())
        if said["kind"] == kind and said["target"]["fingerprint"] == fingerprint:
            return path.parent
    return None
