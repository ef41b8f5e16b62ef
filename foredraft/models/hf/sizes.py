"""Sizes of a checkpoint for transformers, checked before the model is built.

transformers makes a Python object for every layer that a config asks for, and only then looks
whether the weight files hold them.
"""

from __future__ import annotations

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.json_files import parse_fields
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.schema import SizeFields
from foredraft.models.files.tensors import FLOATS

NO_LIMIT = 1 << 30
"""Context of models whose config names no limit (positions by attention bias)."""


def read_sizes(checkpoint: Checkpoint) -> SizeFields:
    """The sizes in ``config.json``, of the text part where there are several.

    Raises:
        ModelLoadError: they are malformed or larger than what the weight files hold; or the
            weights are of a type that means nothing without scales.
    """
    path, raw = checkpoint.directory / "config.json", checkpoint.config
    text = raw.get("text_config") or raw
    if not isinstance(text, dict):
        raise ModelLoadError(f"{path}: text_config is {text!r:.80}; it must be an object")
    sizes = parse_fields(path, text, SizeFields)
    largest = max((max(t.shape, default=1) for t in checkpoint.tensors.values()), default=0)
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    limits = dict.fromkeys((*heads, "hidden_size", "vocab_size"), largest)
    limits |= dict.fromkeys(("num_hidden_layers", "encoder_layers"), len(checkpoint.tensors))
    for name, limit in limits.items():
        if (getattr(sizes, name) or 0) > limit:
            raise ModelLoadError(
                f"{path}: {name} is {getattr(sizes, name)}, and the weight files hold "
                f"{len(checkpoint.tensors)} tensors, whose longest side is {largest}. Correct the "
                "file, or get the whole checkpoint again"
            )
    if not raw.get("quantization_config"):
        _check_types(checkpoint)
    return sizes


def _check_types(checkpoint: Checkpoint) -> None:
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("weight") and tensor.dtype not in FLOATS:
            raise ModelLoadError(
                f"{checkpoint.directory}: {name} is stored as {tensor.dtype}, and config.json has "
                "no quantization_config that would say what it means; get the model in bfloat16"
            )
