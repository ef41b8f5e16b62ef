"""The shape of a llama-shaped checkpoint, read from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.cache.base import KVShape
from foredraft.core.errors import ModelLoadError
from foredraft.models.files.json_files import read_json
from foredraft.models.files.schema import LlamaFields, RopeFields, parse_fields

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` values this decoder implements. SmolLM and SmolLM2 are "llama"."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of a decoder. Fields are named as in ``config.json`` where it has them.

    Attributes:
        rope_inv_freq_scaling: rotary scaling parameters, or None for plain rotary embedding.
        qk_norm: heads of queries and keys are RMS-normalised (Qwen3).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_inv_freq_scaling: Mapping[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_hidden_layers, self.num_key_value_heads, self.head_dim)

    @property
    def max_context(self) -> int:
        return self.max_position_embeddings

    @property
    def num_matrix_parameters(self) -> int:
        """Weights of the linear layers and the head: what each token is multiplied with."""
        query = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        layer = self.hidden_size * (2 * query + 2 * key_value + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights, with a tied head counted once."""
        hidden, head = self.hidden_size, self.head_dim
        query, key_value = self.num_attention_heads * head, self.num_key_value_heads * head
        layer = hidden * (2 * query + 2 * key_value + 3 * self.intermediate_size + 2)
        layer += (query + 2 * key_value) * self.attention_bias + hidden * self.output_bias
        layer += 2 * head * self.qk_norm
        heads = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + heads + hidden


def why_not_native(
    raw: Mapping[str, Any], path: Path, max_context: int | None = None
) -> str | None:
    """What a checkpoint of these families needs that this decoder lacks; None: nothing.

    Of other families the family.

    Args:
        max_context: most tokens that will be read; None: as many as the model takes.

    Raises:
        ModelLoadError: it is of such a family, and malformed. ``path`` is named then.
    """
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        return f"model_type {model_type!r:.80} is not one of {', '.join(FAMILIES)}"
    return _unsupported(parse_fields(path, raw, LlamaFields), max_context)


def read_config(directory: Path, max_context: int | None = None) -> DecoderConfig:
    """Parse ``config.json``.

    Args:
        max_context: as in `why_not_native`.

    Raises:
        ModelLoadError: the file is malformed, or the family or one of its features is not
            implemented here.
    """
    path = directory / "config.json"
    raw = read_json(path)
    if reason := why_not_native(raw, path, max_context):
        raise ModelLoadError(f"{directory}: {reason}; load it with backend 'hf'")
    return _resolve(parse_fields(path, raw, LlamaFields))


def _resolve(fields: LlamaFields) -> DecoderConfig:
    rope = _rope(fields)
    bias = bool(fields.attention_bias) and fields.model_type in ("llama", "qwen3")
    return DecoderConfig(
        model_type=fields.model_type,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_hidden_layers=fields.num_hidden_layers,
        num_attention_heads=fields.num_attention_heads,
        num_key_value_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=fields.head_size,
        max_position_embeddings=fields.max_position_embeddings,
        rms_norm_eps=fields.rms_norm_eps,
        rope_theta=rope.rope_theta or fields.rope_theta or 10000.0,
        rope_inv_freq_scaling=rope.model_dump() if _scales(rope) else None,
        tie_word_embeddings=bool(fields.tie_word_embeddings),
        attention_bias=bias or fields.model_type == "qwen2",
        output_bias=bias,
        qk_norm=fields.model_type == "qwen3",
        eos_token_ids=fields.eos_token_id,
    )


def _sliding_window(fields: LlamaFields) -> int | None:
    """How many tokens some layer sees; None where all of them see the whole context."""
    window = fields.sliding_window
    if fields.model_type == "mistral":  # windowed unless it says null
        window = window if "sliding_window" in fields.model_fields_set else 4096
    elif not fields.use_sliding_window or fields.max_window_layers >= fields.num_hidden_layers:
        window = None
    return None if window is None or window >= fields.max_position_embeddings else window


def _rope(fields: LlamaFields) -> RopeFields:
    for rope in (fields.rope_parameters, fields.rope_scaling):
        if rope is not None and rope.model_fields_set:
            return rope
    return RopeFields()


def _scales(rope: RopeFields) -> bool:
    return rope.rope_type not in (None, "default")


def _unsupported(fields: LlamaFields, max_context: int | None) -> str | None:
    """What this checkpoint needs that the decoder lacks, or None."""
    if fields.hidden_act != "silu":
        return f"activation {fields.hidden_act!r:.80} is not implemented"
    if fields.mlp_bias:
        return "mlp_bias is not implemented"
    if fields.quantization_config:
        return "quantised checkpoints are not implemented"
    window = _sliding_window(fields)
    if window is not None and (max_context is None or max_context > window):
        return (
            f"the model attends to a window of {window} tokens, which the native engine does not "
            f"do yet (up to max_context={window} it can run the model)"
        )
    if _rope(fields).rope_type not in (None, "default", "linear", "llama3"):
        return f"rotary scaling {_rope(fields).rope_type!r:.80} is not implemented"
    return None
