"""The shape of a llama-shaped checkpoint, read from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.cache.kv import KVShape
from foredraft.core.errors import ModelLoadError
from foredraft.models.json_files import read_json

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
    sliding_window: int | None = None

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_hidden_layers, self.num_key_value_heads, self.head_dim)

    @property
    def max_context(self) -> int:
        """Full attention equals sliding-window attention only inside the window."""
        return min(
            self.max_position_embeddings, self.sliding_window or self.max_position_embeddings
        )

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


def is_native(raw: Mapping[str, Any]) -> bool:
    """Whether this decoder implements the checkpoint's family."""
    return raw.get("model_type") in FAMILIES and not _unsupported(raw)


def read_config(directory: Path) -> DecoderConfig:
    """Parse ``config.json``.

    Raises:
        ModelLoadError: the family or one of its features is not implemented here.
    """
    raw = read_json(directory / "config.json")
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise ModelLoadError(
            f"{directory}: model_type {model_type!r} is not one of {', '.join(FAMILIES)}; "
            "load it with backend 'hf'"
        )
    if reason := _unsupported(raw):
        raise ModelLoadError(f"{directory}: {reason}; load it with backend 'hf'")
    try:
        return _parse(raw)
    except KeyError as missing:
        raise ModelLoadError(
            f"{directory / 'config.json'} does not give {missing}, which a {model_type} model needs"
        ) from None


def _parse(raw: Mapping[str, Any]) -> DecoderConfig:
    model_type = raw["model_type"]
    rope = _rope(raw)
    heads = raw["num_attention_heads"]
    bias = bool(raw.get("attention_bias")) and model_type in ("llama", "qwen3")
    eos = raw.get("eos_token_id")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=_head_dim(raw),
        max_position_embeddings=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rope_inv_freq_scaling=rope if rope["rope_type"] != "default" else None,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias or model_type == "qwen2",
        output_bias=bias,
        qk_norm=model_type == "qwen3",
        eos_token_ids=tuple([eos] if isinstance(eos, int) else eos or ()),
        sliding_window=_sliding_window(raw),
    )


def _head_dim(raw: Mapping[str, Any]) -> int:
    if "head_dim" not in raw and raw["model_type"] == "qwen3":
        return 128  # the family's default; the others divide the hidden size
    return int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    if raw["model_type"] == "mistral":
        window: int | None = raw.get("sliding_window", 4096)  # windowed unless it says null
        return window
    return raw.get("sliding_window") if raw.get("use_sliding_window") else None


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters; checkpoints of transformers 4 and 5 spell them differently."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    return rope


def _unsupported(raw: Mapping[str, Any]) -> str | None:
    """What this checkpoint needs that the decoder lacks, or None."""
    if raw.get("hidden_act", "silu") != "silu":
        return f"activation {raw['hidden_act']!r} is not implemented"
    if raw.get("mlp_bias"):
        return "mlp_bias is not implemented"
    if raw.get("quantization_config"):
        return "quantised checkpoints are not implemented"
    rope_type = _rope(raw)["rope_type"]
    if rope_type not in ("default", "linear", "llama3"):
        return f"rotary scaling {rope_type!r} is not implemented"
    return None
