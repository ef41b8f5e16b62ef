"""Our checkpoint as a GGUF file, for peers that read nothing else. Written, never parsed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.core.errors import ConfigError, unknown
from foredraft.models.native.config import DecoderConfig, read_config
from foredraft.models.native.source_blocks import FILE as SOURCE_BLOCKS
from foredraft.models.text.tokenizer import Tokenizer

QUANTISATIONS = ("bf16", "q8_0", "q4_1", "q4_0")

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(directory: Path, path: Path, quantisation: str) -> None:
    """Write a llama-shaped checkpoint as GGUF, with its matrices quantised.

    Raises:
        ConfigError: another family, or an unknown quantisation.
    """
    if quantisation not in QUANTISATIONS:
        raise unknown("quantisation", quantisation, QUANTISATIONS)
    import gguf

    config = read_config(directory)
    if config.model_type != "llama":
        raise ConfigError(f"only llama checkpoints are written as GGUF, not {config.model_type}")
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_settings(writer, config)
    _write_vocabulary(writer, directory, config)
    kind = getattr(gguf.GGMLQuantizationType, quantisation.upper())
    for name, values in _tensors(directory, config):
        matrix = values.ndim == 2
        stored = kind if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: Any, config: DecoderConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.ropes[0].theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_vocabulary(writer: Any, directory: Path, config: DecoderConfig) -> None:
    """The vocabulary and the chat template, so that a conversation becomes the same tokens."""
    import gguf

    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    model, added = tokenizer["model"], tokenizer.get("added_tokens", [])
    by_id = {index: token for token, index in model["vocab"].items()}
    by_id |= {token["id"]: token["content"] for token in added}
    kinds = dict.fromkeys(by_id, gguf.TokenType.NORMAL)
    kinds |= {t["id"]: gguf.TokenType.CONTROL for t in added if t.get("special")}
    ids = range(config.vocab_size)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([by_id.get(i, f"<unused{i}>") for i in ids])
    writer.add_token_types([kinds.get(i, gguf.TokenType.UNUSED) for i in ids])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    if config.eos_token_ids:
        writer.add_eos_token_id(config.eos_token_ids[0])
    template = Tokenizer(directory).chat_template
    if template is not None:
        writer.add_chat_template(template)


def _tensors(directory: Path, config: DecoderConfig) -> Iterator[tuple[str, Any]]:
    """GGUF name and float32 values of each tensor."""
    from safetensors import safe_open

    heads = {
        "self_attn.q_proj": config.num_attention_heads,
        "self_attn.k_proj": config.num_key_value_heads,
    }
    for file_path in sorted(directory.glob("*.safetensors")):
        if file_path.name == SOURCE_BLOCKS:
            continue  # the same weights once more, as they came
        with safe_open(str(file_path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                values = file.get_tensor(key).float().numpy()
                base = key.removesuffix(".weight")
                if base in _TOP_NAMES:
                    yield f"{_TOP_NAMES[base]}.weight", values
                    continue
                _, _, layer, part = base.split(".", 3)
                if part in heads:
                    values = _paired_rows(values, heads[part])
                yield f"blk.{layer}.{_LAYER_NAMES[part]}.weight", values


def _paired_rows(weight: Any, heads: int) -> Any:
    """llama.cpp keeps the two halves that rotary embedding pairs next to each other."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
