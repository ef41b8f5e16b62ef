"""Checkpoints as GGUF files: for peers that read nothing else, and for tests of our own reader.

The names of fields and tensors are those of the format's own package, not those that our reader
knows. Written, never parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf_quants import NESTED
from foredraft.core.errors import ConfigError, unknown
from foredraft.models.native.config import DecoderConfig, Latent, read_config
from foredraft.models.native.source_blocks import FILE as SOURCE_BLOCKS
from foredraft.models.text.tokenizer import Tokenizer

QUANTISATIONS = (
    *("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_1", "q4_0"),
    *(name.lower() for name in NESTED),
)
_ARCHITECTURES = {
    "llama": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
    "smollm3": "SMOLLM3",
    "olmo2": "OLMO2",
    "olmoe": "OLMOE",
    "granite": "GRANITE",
    "phi3": "PHI3",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "gemma4_text": "GEMMA4",
    "lfm2": "LFM2",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
    "qwen3_next": "QWEN3NEXT",
    "lfm2_moe": "LFM2MOE",
    "glm4_moe": "GLM4_MOE",
    "gpt_oss": "GPT_OSS",
    "glm4": "GLM4",
    "ernie4_5": "ERNIE4_5",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "seed_oss": "SEED_OSS",
    "exaone4": "EXAONE4",
    "olmo3": "OLMO2",
    "cohere2": "COHERE2",
    "stablelm": "STABLELM",
    "starcoder2": "STARCODER2",
    "arcee": "ARCEE",
    "granitemoehybrid": "GRANITE_HYBRID",
    "falcon_h1": "FALCON_H1",
    "nemotron_h": "NEMOTRON_H",
    "mamba2": "MAMBA2",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu"), "DEEPSEEK2"),
}
"""The GGUF package's name of the architecture of a ``model_type``."""
FAMILIES = tuple(_ARCHITECTURES)
_DRAFTING = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}
"""Qwen's names of what lies around a layer that predicts further tokens, and DeepSeek's."""

_WINDOWED = (
    *("phi3", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "exaone4", "olmo3", "cohere2"),
)
_PAIRED = ("llama", "mixtral", "smollm3", "granite", "granitemoehybrid", "arcee")


def write_gguf(
    directory: Path,
    path: Path,
    quantisation: str,
    written: dict[str, Any] | None = None,
    is_older: bool = False,
) -> None:
    """Write a checkpoint as GGUF, with its matrices quantised.

    Args:
        is_older: as before April 2025, when one tensor made keys and values of latents.
        written: is filled with the numbers that the file holds, float32, by their names in the
            checkpoint.

    Raises:
        ConfigError: a family that has no such files here, or an unknown quantisation.
    """
    if quantisation not in QUANTISATIONS:
        raise unknown("quantisation", quantisation, QUANTISATIONS)
    import gguf

    config = read_config(directory)
    if config.model_type not in _ARCHITECTURES:
        raise ConfigError(f"{config.model_type} checkpoints are not written as GGUF")
    has_own = config.model_type == "nemotron_h" and config.experts
    arch = gguf.MODEL_ARCH[_ARCHITECTURES[config.model_type] + ("_MOE" if has_own else "")]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    raw = json.loads((directory / "config.json").read_text())
    num_layers, values = config.num_hidden_layers, dict(_values(directory))
    values = {_behind(name, num_layers): numbers for name, numbers in values.items()}
    num_own = int(any(name.startswith(f"model.layers.{num_layers}.") for name in values))
    write_settings(writer, config, raw, num_own)
    if is_older and config.latent:
        fields = writer.kv_data[0]
        for name in ("key_length", "value_length"):
            fields[f"{writer.arch}.attention.{name}"] = fields.pop(
                f"{writer.arch}.attention.{name}_mla"
            )
        fields.pop(f"{writer.arch}.attention.head_count_kv")
        writer.add_head_count_kv(config.num_attention_heads)
    _write_vocabulary(writer, directory, config)
    for name, factors in _rotary_factors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    names = gguf.get_tensor_name_map(arch, num_layers + num_own)
    for whole, all_values in _stacked(iter(values.items())):
        parts = {} if is_older and "kv_b_proj" in whole else _apart(whole, config)
        numbers = np.empty_like(all_values) if written is not None and parts else None
        for name, (axes, index) in (parts or {whole: (None, ...)}).items():
            theirs = _of_drafting(name, num_layers) or names.get_name(
                _as_converted(name), try_suffixes=(".weight", ".bias", ".scale")
            )
            if theirs is None:
                raise ConfigError(f"{name} has no name in GGUF files of {config.model_type}")
            values = all_values.transpose(axes)[index] if parts else all_values
            own: dict[str, Any] | None = {} if parts else written
            _write_tensor(writer, theirs, name, values, quantisation, config, own)
            if numbers is not None and own:
                found = [own[key] for key in sorted(own, key=_number_of_expert)]
                one = np.stack(found) if "{expert}" in name else found[0]
                numbers.transpose(axes)[index] = one
        if numbers is not None and written is not None:
            written[whole] = numbers
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tensor(
    writer: Any,
    theirs: str,
    name: str,
    values: Any,
    quantisation: str,
    config: DecoderConfig,
    written: dict[str, Any] | None,
) -> None:
    import gguf

    values = np.atleast_1d(values.squeeze())  # a convolution has one channel at a time
    order = _tiled_heads(name, config)
    if order is not None:
        values = values[:, order] if name.endswith("out_proj.weight") else values[order]
    if name.endswith("A_log"):
        values = -np.exp(values)
    is_mamba = ".mamba." in name or ".mixer." in name
    if is_mamba and name.endswith((".A_log", ".D")):
        values = values[:, None]
    if is_mamba and name.endswith(".norm.weight") and config.recurrent:
        values = values.reshape(config.recurrent.key_heads, -1)
    is_norm = name.endswith("norm.weight") and "linear_attn" not in name
    is_small = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv.", "per_layer_model_proj")
    is_matrix = values.ndim > 1 and theirs.endswith(".weight") and "_norm." not in theirs
    is_matrix = is_matrix and not any(part in theirs for part in is_small)
    kind = gguf.GGMLQuantizationType[quantisation.upper() if is_matrix else "F32"]
    added = np.float32(config.family.norm_offset if is_norm else 0)
    rows = quantised(values + added, kind)
    if written is not None:
        numbers = gguf.dequantize(rows, kind).reshape(values.shape) - added
        if (
            is_mamba
            and not is_matrix
            and values.ndim == 2
            and "conv1d" not in name
            and "gate" not in name
        ):
            numbers = numbers.flatten()
        if name.endswith("A_log"):
            numbers = np.log(-numbers)
        if order is not None:
            back = np.argsort(order)
            is_output = name.endswith("out_proj.weight")
            numbers = numbers[:, back] if is_output else numbers[back]
        if "conv.weight" in name or "conv1d.weight" in name:
            numbers = numbers[:, None]
        named = [(name.replace("{expert}", f"{i}"), one) for i, one in enumerate(numbers)]
        written |= dict(named if "{expert}" in name else [(name, numbers)])
    heads = _ordered_heads(name, config)
    writer.add_tensor(theirs, _paired_rows(rows, heads) if heads else rows, raw_dtype=kind)


def _tiled_heads(name: str, config: DecoderConfig) -> Any:
    """The order of value heads in files: those of one key head are not neighbours.

    Returns:
        Rows of the tensor, of an output projection columns; None: they stay.
    """
    sizes = config.recurrent
    if "linear_attn" not in name or name.endswith("norm.weight") or sizes is None:
        return None
    if not config.model_type.startswith("qwen3_5"):
        return None
    heads = np.arange(sizes.value_heads).reshape(sizes.key_heads, -1).T.flatten()
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return heads
    values = (heads[:, None] * sizes.value_size + np.arange(sizes.value_size)).flatten()
    if name.endswith(("in_proj_z.weight", "out_proj.weight")):
        return values
    keys = 2 * sizes.key_heads * sizes.key_size
    return np.concatenate([np.arange(keys), keys + values])


def _apart(name: str, config: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    """Of what llama.cpp's converter takes apart: each part's axes and place in it."""
    if config.model_type == "gpt_oss" and ".experts." in name:
        first, last = slice(None, None, 2), slice(1, None, 2)
        axes, kind = ((0, 1), "bias") if name.endswith("_bias") else ((0, 2, 1), "weight")
        before = f"{name.partition('.experts.')[0]}.experts.{{expert}}."
        if "down_proj" in name:
            return {f"{before}down_proj.{kind}": (axes, ...)}
        every = slice(None)
        return {
            f"{before}gate_proj.{kind}": (axes, (every, first)),
            f"{before}up_proj.{kind}": (axes, (every, last)),
        }
    if name.endswith("_linear.weight"):
        return _apart_of_granite(name, config)
    if config.latent is not None and name.endswith("kv_b_proj.weight"):
        return _apart_of_latent(name.removesuffix("kv_b_proj.weight"), config.latent, config)
    sizes = config.recurrent
    if sizes is None or not name.endswith("in_proj_qkvz.weight"):
        return {}
    values = sizes.value_heads // sizes.key_heads * sizes.value_size
    by_head = np.arange(sizes.num_inputs).reshape(sizes.key_heads, -1)
    ends = np.cumsum([sizes.key_size, sizes.key_size, values])
    *qkv, z = (rows.flatten() for rows in np.split(by_head, ends, axis=1))
    before = name.removesuffix("qkvz.weight")
    return {
        f"{before}qkv.weight": ((0, 1), np.concatenate(qkv)),
        f"{before}z.weight": ((0, 1), z),
    }


def _apart_of_latent(
    before: str, sizes: Latent, config: DecoderConfig
) -> dict[str, tuple[Any, Any]]:
    heads = config.num_attention_heads
    rows = np.arange(heads * (sizes.still + sizes.value_size)).reshape(heads, -1)
    keys, values = np.split(rows, [sizes.still], axis=1)
    transposed = (keys[:, None, :], np.arange(sizes.rank)[None, :, None])
    return {
        f"{before}k_b_proj.weight": ((0, 1), transposed),
        f"{before}v_b_proj.weight": ((0, 1), values),
    }


def _apart_of_granite(name: str, config: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    layer = name.rpartition(".")[0].rpartition(".")[0].rpartition(".")[0]
    axes: tuple[int, ...] = (0, 1)
    size, part = config.intermediate_size, "mlp"
    if "block_sparse_moe" in name:
        axes, part = (0, 1, 2), "mlp.experts.{expert}"
    elif config.experts:
        size, part = config.experts.num_shared * size, "mlp.shared_expert"
    if "output" in name:
        return {f"{layer}.{part}.down_proj.weight": (axes, ...)}
    gates, others = (..., slice(size), slice(None)), (..., slice(size, None), slice(None))
    return {
        f"{layer}.{part}.gate_proj.weight": (axes, gates),
        f"{layer}.{part}.up_proj.weight": (axes, others),
    }


def _number_of_expert(name: str) -> int:
    return int(name.partition(".experts.")[2].partition(".")[0] or 0)


def _as_converted(name: str) -> str:
    """As llama.cpp's converter calls it."""
    known = _of_all_experts(name).replace("dt_bias", "dt_proj.bias")
    known = known.replace("e_score_correction_bias", "e_score_correction.bias")
    known = known.replace(".expert_bias", ".expert_bias.bias")
    known = known.replace("router.scale", "router.proj.scale")
    known = known.replace("router.per_expert_scale", "experts.down_proj.scale")
    bare = (".sinks", ".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")
    return f"{known}.weight" if known.endswith(bare) else known


def quantised(values: Any, kind: Any) -> Any:
    """Rows as a file stores them, of a type of the format's own package."""
    import gguf

    nested = NESTED.get(kind.name)
    return nested(values) if nested else gguf.quantize(values, kind)


def write_settings(
    writer: Any, config: DecoderConfig, raw: Mapping[str, Any], num_own: int = 0
) -> None:
    """All that is no vocabulary.

    Args:
        raw: the checkpoint's ``config.json``.
        num_own: layers behind the model's, which predict further tokens.
    """
    import gguf

    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + num_own)
    if num_own:
        writer.add_nextn_predict_layers(num_own)
    layers = range(config.num_hidden_layers)
    differ = config.reader_times > 1 or config.model_type == "nemotron_h"
    sizes = [config.feed_forward(index)[1] for index in layers if differ]
    has_attention = config.num_attending_layers > 0
    writer.add_feed_forward_length(sizes or (raw["intermediate_size"] if has_attention else 0))
    writer.add_head_count(config.num_attention_heads if has_attention else 0)
    if config.model_type == "granitemoehybrid":
        kv_heads = config.num_key_value_heads
        writer.add_head_count_kv([0 if one.is_recurrent else kv_heads for one in config.kinds])
        writer.add_rope_scaling_finetuned(False)
        writer.add_expert_shared_feed_forward_length(raw["shared_intermediate_size"])
    elif config.model_type.startswith("lfm2"):
        kv_heads = config.num_key_value_heads
        writer.add_head_count_kv([0 if one.is_recurrent else kv_heads for one in config.kinds])
        writer.add_shortconv_l_cache(raw["conv_L_cache"])
    elif config.model_type == "nemotron_h":
        kv_heads = config.num_key_value_heads
        writer.add_head_count_kv([kv_heads if one.attends else 0 for one in config.kinds])
        writer.add_rope_scaling_finetuned(False)
    elif config.model_type == "gemma4_text":
        _write_wide_heads(writer, config, raw)
    elif has_attention:
        writer.add_head_count_kv(config.num_key_value_heads)
    if config.recurrent is not None and config.recurrent.kind == "delta_net":
        writer.add_full_attention_interval(raw.get("full_attention_interval", 4))
        recurrent = [one.is_recurrent for one in config.kinds] + [False] * num_own
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    if config.recurrent is not None and config.recurrent.kind != "short_conv":
        writer.add_ssm_conv_kernel(config.recurrent.window)
        writer.add_ssm_state_size(config.recurrent.key_size)
        writer.add_ssm_group_count(config.recurrent.key_heads)
        writer.add_ssm_time_step_rank(config.recurrent.value_heads)
        writer.add_ssm_inner_size(config.recurrent.num_outputs)
    if config.model_type.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    left_out = config.model_type in ("phi3", "mamba2") or "granite" in config.model_type
    if not left_out:  # by converters
        _, size = config.wide_heads or (0, config.head_dim)
        writer.add_key_length(size)
        writer.add_value_length(config.latent.rank if config.latent else size)
    if not config.family.has_single_parts:
        writer.add_rope_dimension_count(config.ropes[0].size)
    rope, size = config.ropes[0], config.head_dim
    scale = (rope.fields.alpha or 1.0) ** (size / (size - 2))  # of Hunyuan
    writer.add_rope_freq_base(rope.theta * scale)
    if config.family.layer_norms or config.model_type == "nemotron_h":
        writer.add_layer_norm_eps(config.rms_norm_eps)
    if not config.family.layer_norms:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _write_scaling(writer, config)
    if config.experts is not None:
        writer.add_expert_count(config.experts.count - config.experts.num_shared)
        writer.add_expert_used_count(config.experts.per_token - config.experts.num_shared)
        if "moe_intermediate_size" in raw or config.model_type == "gpt_oss":
            writer.add_expert_feed_forward_length(config.intermediate_size)
        if "shared_expert_intermediate_size" in raw:
            size = raw["shared_expert_intermediate_size"]
            writer.add_expert_shared_feed_forward_length(size)
        if config.model_type == "nemotron_h":
            size = raw["moe_shared_expert_intermediate_size"]
            writer.add_expert_shared_feed_forward_length(size)
        elif config.family.chances == "sigmoid":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_leading_dense_block_count(config.experts.num_dense)
    if config.latent is not None:
        _write_latent(writer, config, config.latent)
    has_groups = config.model_type in ("glm4_moe", "deepseek_v2", "deepseek_v3")
    if has_groups or (config.model_type == "nemotron_h" and config.experts):
        writer.add_expert_shared_count(raw["n_shared_experts"])
        writer.add_expert_weights_scale(raw["routed_scaling_factor"])
        if raw["norm_topk_prob"]:
            writer.add_expert_weights_norm(True)
        writer.add_expert_group_count(raw["n_group"])
        writer.add_expert_group_used_count(raw["topk_group"])
    if config.model_type == "stablelm":
        writer.add_parallel_residual(raw["use_parallel_residual"])
    if config.model_type == "cohere2":
        writer.add_logit_scale(raw["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config.model_type.startswith("granite"):
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
    if config.model_type in _WINDOWED:
        writer.add_sliding_window(raw["sliding_window"] or 0)
    if config.model_type in ("gemma3_text", "gemma4_text"):
        writer.add_rope_freq_base_swa(config.ropes[1].theta)
    if config.model_type in ("gemma3_text", "gemma4_text", "exaone4", "olmo3"):
        writer.add_sliding_window_pattern([kind.window is not None for kind in config.kinds])
    if config.attention_cap is not None:
        writer.add_attn_logit_softcapping(config.attention_cap)
    if config.logits_cap is not None:
        writer.add_final_logit_softcapping(config.logits_cap)


def _write_latent(writer: Any, config: DecoderConfig, sizes: Latent) -> None:
    import gguf

    writer.add_kv_lora_rank(sizes.rank)
    if sizes.query_rank:
        writer.add_q_lora_rank(sizes.query_rank)
    writer.add_key_length_mla(sizes.still + config.ropes[0].size)
    writer.add_value_length_mla(sizes.value_size)
    if weight := config.ropes[0].fields.mscale_all_dim:
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)
    if config.experts is None:
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
    elif config.family.chances == "softmax":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        writer.add_leading_dense_block_count(config.experts.num_dense)


def _write_wide_heads(writer: Any, config: DecoderConfig, raw: Mapping[str, Any]) -> None:
    """Heads of Gemma 4, which differ by layer."""
    writer.add_head_count_kv([config.heads(kind)[0] for kind in config.kinds])
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_shared_kv_layers(raw["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config.input_size)


def _write_scaling(writer: Any, config: DecoderConfig) -> None:
    import gguf

    rope = config.ropes[0]
    if rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.fields.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.fields.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.fields.original_max_position_embeddings)
        if rope.fields.beta_fast is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope.fields.beta_fast)
    if rope.kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope.fields.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(rope.amplitude)


def _rotary_factors(config: DecoderConfig) -> dict[str, Any]:
    """Tensors that say by what frequencies are divided."""
    rope = config.ropes[0]
    if rope.kind == "longrope":
        lengths = ("long", "short")
        found = {name: getattr(rope.fields, f"{name}_factor") for name in lengths}
        return {f"rope_factors_{name}.weight": factors for name, factors in found.items()}
    if rope.kind == "llama3":
        plain = rope.theta ** -(np.arange(0, rope.size, 2) / rope.size)
        return {"rope_freqs.weight": plain / rope.inverse_frequencies().numpy()}
    if rope.kind == "proportional":
        return {"rope_freqs.weight": np.where(rope.inverse_frequencies().numpy() > 0, 1.0, 1e30)}
    return {}


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
    splits_digits = "Digits" in json.dumps(tokenizer["pre_tokenizer"])
    writer.add_tokenizer_pre("smollm" if splits_digits else "gpt-2")
    writer.add_token_list([by_id.get(i, f"<unused{i}>") for i in ids])
    writer.add_token_types([kinds.get(i, gguf.TokenType.UNUSED) for i in ids])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    if config.eos_token_ids:
        writer.add_eos_token_id(config.eos_token_ids[0])
    template = Tokenizer(directory).chat_template
    if template is not None:
        writer.add_chat_template(template)


def _values(directory: Path) -> Iterator[tuple[str, Any]]:
    """Name and float32 values of each tensor."""
    from safetensors import safe_open

    for file_path in sorted(directory.glob("*.safetensors")):
        if file_path.name == SOURCE_BLOCKS:
            continue  # the same weights once more, as they came
        with safe_open(str(file_path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, file.get_tensor(name).float().numpy()


def _behind(name: str, num_layers: int) -> str:
    """A layer that predicts further tokens lies behind the model's, whatever its maker calls it."""
    layer, (before, _, end) = f"model.layers.{num_layers}.", name.rpartition(".")
    if before in _DRAFTING:
        return f"{layer}{_DRAFTING[before]}.{end}"
    return name.replace("mtp.layers.0.", layer)


def _of_drafting(name: str, num_layers: int) -> str | None:
    """Names that the format's package has in newer versions."""
    part = name.removeprefix(f"model.layers.{num_layers}.").removesuffix(".weight")
    if part not in _DRAFTING.values():
        return None
    return f"blk.{num_layers}.nextn.{part.replace('head.', 'head_')}.weight"


def _stacked(tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same, the matrices of all experts as one tensor whose name has ``{expert}`` in it."""
    experts: dict[str, dict[int, Any]] = {}
    for name, values in tensors:
        before, _, behind = name.partition(".experts.")
        number, _, part = behind.partition(".")
        if not number.isdigit():
            yield name, values
            continue
        experts.setdefault(f"{before}.experts.{{expert}}.{part}", {})[int(number)] = values
    for name, by_number in experts.items():
        yield name, np.stack([by_number[number] for number in range(len(by_number))])


def _of_all_experts(name: str) -> str:
    """The GGUF converters' names of the matrices of all experts together."""
    joined = name.replace(".{expert}.", ".")
    if ".mixer.experts." in joined:
        return joined.replace("backbone", "model").replace("mixer", "mlp")
    if "block_sparse_moe.experts" not in joined and "feed_forward.experts" not in joined:
        return joined
    return joined.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")


def _ordered_heads(name: str, config: DecoderConfig) -> int:
    """Number of heads in which rows of queries and keys are reordered; 0: they are not."""
    if config.model_type not in _PAIRED:
        return 0
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def _paired_rows(rows: Any, heads: int) -> Any:
    """llama.cpp keeps the two halves that rotary embedding pairs next to each other."""
    count, *columns = rows.shape
    halves = rows.reshape(heads, 2, count // heads // 2, *columns)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def bits_per_weight(quantisation: str) -> float:
    """Of matrices in a file."""
    import gguf

    count, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quantisation.upper()]]
    return float(8 * num_bytes / count)
