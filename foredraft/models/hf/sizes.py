"""Configs of transformers: sizes, checked before a model is built.

transformers makes a Python object for every layer that a config asks for, and only then looks
whether the weight files hold them.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from foredraft.cache.base import KVShape
from foredraft.core.errors import ModelLoadError
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.tensors import FLOATS

NO_LIMIT = 1 << 30
"""Context of models whose config names no limit (positions by attention bias)."""
_SIDES = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size")
_DEPTHS = ("num_hidden_layers", "encoder_layers", "num_decoder_layers")


def read_config(checkpoint: Checkpoint) -> Any:
    """The config of a model of transformers.

    Raises:
        ModelLoadError: it is malformed, or larger than what the weight files hold; or the weights
            are of a type that means nothing without scales.
    """
    directory, tensors = checkpoint.directory, checkpoint.tensors
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        text = config.get_text_config(decoder=True)
        sizes = {name: getattr(text, name, None) or 0 for name in (*_SIDES, *_DEPTHS)}
    except Exception as error:  # transformers and the model's code may raise anything
        raise cannot_run(directory, error) from error
    largest = max((max(t.shape, default=1) for t in tensors.values()), default=0)
    limits = dict.fromkeys(_SIDES, largest) | dict.fromkeys(_DEPTHS, len(tensors))
    for name, limit in limits.items():
        if sizes[name] > limit:
            raise ModelLoadError(
                f"{directory / 'config.json'}: {name} is {sizes[name]}, and the weight files hold "
                f"{len(tensors)} tensors, whose longest side is {largest}. Correct the file, or "
                "get the whole checkpoint again"
            )
    if not checkpoint.config.get("quantization_config"):
        _check_types(checkpoint)
    return config


def cannot_run(directory: Path, error: Exception) -> ModelLoadError:
    """The error where transformers refuses a checkpoint."""
    # The message may quote the config, and half a surrogate pair in it could not be printed.
    reason = f"{type(error).__name__}: {error!s:.300}".encode(errors="replace").decode()
    return ModelLoadError(
        f"{directory} cannot be run by transformers: {reason}. "
        "Correct config.json, or get the whole checkpoint again"
    )


def decoder_of(config: Any) -> Any:
    """The part of a config that says what a decoder is; T5's may be less deep than its encoder."""
    decoder = config.get_text_config(decoder=True)
    if num_layers := getattr(decoder, "num_decoder_layers", None):
        decoder = copy(decoder)
        decoder.num_hidden_layers = num_layers
    return decoder


def context_limit(config: Any) -> int:
    """Most tokens of a text."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    found = (limit for name in names if (limit := getattr(config, name, None)))
    return int(next(found, NO_LIMIT))


def kv_shape(config: Any) -> KVShape:
    """Keys and values of a token."""
    decoder = decoder_of(config)
    heads = getattr(decoder, "num_attention_heads", None) or 1
    size = getattr(decoder, "head_dim", None) or decoder.hidden_size // heads
    num_kv = getattr(decoder, "num_key_value_heads", None) or heads
    return KVShape(decoder.num_hidden_layers, num_kv, size)


def _check_types(checkpoint: Checkpoint) -> None:
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("weight") and tensor.dtype not in FLOATS:
            raise ModelLoadError(
                f"{checkpoint.directory}: {name} is stored as {tensor.dtype}, and config.json has "
                "no quantization_config that would say what it means; get the model in bfloat16"
            )
