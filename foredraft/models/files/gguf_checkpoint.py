"""A GGUF file as a checkpoint in the hub's own form: config, tokenizer and an index of tensors.

The weights stay in the file, or are written as safetensors for code that reads nothing else.
`foredraft.models.families` holds GGUF's names of the fields and tensors of a family. A field that
is not known there is refused by name: a model that runs with half of its features gives wrong
text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from foredraft.core.errors import ModelLoadError
from foredraft.models.families import GGUF_NORMS, RECURRENT_TYPES, Family, Gguf, family_of_gguf
from foredraft.models.files.gguf import GgufFile, GgufTensor
from foredraft.models.files.gguf_blocks import BY_NAME
from foredraft.models.files.gguf_tokenizer import write_tokenizer
from foredraft.models.files.json_files import parse_fields
from foredraft.models.files.safety import GGUF_INDEX
from foredraft.models.files.schema import (
    TOKENIZER_KEY,
    DecoderFields,
    GgufFields,
    GgufTokenizerFields,
    RopeFields,
)
from foredraft.models.files.stored import read_blocks, read_tensor
from foredraft.models.files.tensors import GgufPlace, StoredTensor

if TYPE_CHECKING:
    import torch

    from foredraft.models.files.progress import Progress
    from foredraft.models.native.config import DecoderConfig, Latent

RECIPE = "GGUF converter 8"
"""Raise it when conversions change: older copies are converted again."""
_ARCHITECTURE, _EXPERTS = "general.architecture", "expert_count"
_MAY_BE_0 = (
    *(_EXPERTS, "leading_dense_block_count"),
    *("attention.shared_kv_layers", "embedding_length_per_layer_input"),
)
"""Keys whose 0 is a count; of others it says that there is no such thing."""
_SAY_NOTHING = {"vocab_size", "rope.scaling.finetuned", "expert_used_count"}
"""Keys without effect on a model's computation, if its family does not read them."""

_SAY_NOTHING_OF_TOKENS = {
    "token_type_count",  # of BERT's segments
    "hf_json",  # the file's other keys say the same
    *("cls_token_id", "mask_token_id", "sep_token_id", "seperator_token_id", "prefix_token_id"),
    *("suffix_token_id", "middle_token_id", "cls_token_type"),
}
"""Keys of the tokenizer that change no ids of a text; as do those of `fim_*` tokens."""

_SAMPLING = {
    **{name: f"general.sampling.{name}" for name in ("top_k", "top_p", "min_p")},
    "temperature": "general.sampling.temp",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Sampling defaults, by their names in ``generation_config.json``."""

_SPECIAL_LAYERS = {
    "sliding_window_pattern": "sliding_attention",
    "layer_types": "linear_attention",
}
"""Fields that files have as a list of whether each layer is of this kind."""

_SAID_BY_TENSORS = {
    **dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias"), ".attn_q.bias"),
    "attention_out_bias": ".attn_output.bias",
    "mlp_bias": ".ffn_down.bias",
    "use_qk_norm": ".attn_q_norm.weight",
    "mamba_conv_bias": ".ssm_conv1d.bias",
    "mamba_rms_norm": ".ssm_norm.weight",
}
"""Tensors that a file has if a field of ``config.json`` is true."""

_DRAFTING = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""Around a layer that predicts further tokens, as DeepSeek names it and as files do."""

_Tensors = Mapping[str, tuple[GgufFile, GgufTensor]]
"""By name, with the part of the file that each is in."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MOST_PARTS = 1000

_KEYS_AND_VALUES = "attn_kv_b"
"""Projects latents to keys and values, in files from before April 2025."""
_YARN_WEIGHT = "rope.scaling.yarn_log_multiplier"
_ROTARY_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""Divisors of the frequencies of rotary embedding: for any text, or of longrope."""
_STILL = 1e30
"""Such a divisor of a pair that does not turn."""
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_index(ggufs: Sequence[Path], into: Path, progress: Progress) -> None:
    """Write a checkpoint into the directory ``into`` whose weights stay where they are.

    Args:
        ggufs: the file, or the parts of a split one in their order. The directory gets links.

    Raises:
        ModelLoadError: a file is damaged or missing, or holds a model that is not known here.
    """
    progress.stage("reading the GGUF file")
    files = _opened(ggufs)
    weights = _write_description(files, into)
    links = {file.path: f"model-{number:05}.gguf" for number, file in enumerate(files, start=1)}
    for path, link in links.items():
        (into / link).symlink_to(path.resolve())
    tensors = {
        name: [links[weight.file], [*weight.shape], place.kind.name, *astuple(place)[1:]]
        for name, weight in weights.items()
        if (place := weight.gguf)
    }
    _write_json(into / GGUF_INDEX, tensors)
    progress.advance(1.0)


def write_checkpoint(gguf: Path, into: Path, progress: Progress) -> None:
    """Write all files of a checkpoint into the directory ``into``.

    Floats stay as they are (as bfloat16 where that says the same); quantised weights are rounded
    to bfloat16, and the blocks of formats that the kernels have are kept beside them.

    Raises:
        ModelLoadError: the file is damaged, or holds a model that is not known here.
    """
    from foredraft.system.files import write_tensors

    progress.stage("converting the tokenizer")
    weights = _write_description(_opened([gguf]), into)
    progress.stage("converting the weights to safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        tensors[name] = _floats(name, weight)
        progress.advance(len(tensors) / len(weights))
    write_tensors(into / "model.safetensors", tensors, {"format": "pt"})
    _write_blocks(weights, into)


def _write_description(files: Sequence[GgufFile], into: Path) -> dict[str, StoredTensor]:
    """Write all but the weights; where each of these is found, by its name in transformers."""
    from foredraft.models.native.config import read_config, why_not_native

    first, tensors = files[0], _all_tensors(files)
    tokenizer = parse_fields(first.path, first.metadata, GgufTokenizerFields)
    _refuse_unknown_of_tokenizer(first)
    config = _config(first, tokenizer, tensors)
    if config["num_hidden_layers"] > len(tensors):
        _refuse(first, f"it has {len(tensors)} tensors, too few for its number of layers")
    if reason := why_not_native(config, first.path):
        _refuse(first, reason)
    _write_json(into / "config.json", config)
    weights = _weights(first, tensors, read_config(into))
    special = {key: index for key, index in tokenizer.special_ids().items() if key in config}
    ends = {"eos_token_id": tokenizer.end_ids()} if len(tokenizer.end_ids()) > 1 else {}
    said = {name: first.metadata.get(key) for name, key in _SAMPLING.items()}
    named: dict[str, Any] = {name: n for name, n in said.items() if type(n) in (int, float)}
    if tokenizer.suppress_tokens:
        named["suppress_tokens"] = tokenizer.suppress_tokens
    _write_json(into / "generation_config.json", special | ends | named)
    write_tokenizer(first.path, tokenizer, config["max_position_embeddings"], into)
    return weights


# ------------------------------------------------------------------------------------ split files


def parts_of(gguf: Path) -> list[Path]:
    """The parts of a split file, of which any may be named; a whole file alone.

    Raises:
        ModelLoadError: one is missing.
    """
    if (match := _PART.fullmatch(gguf.name)) is None:
        return [gguf]
    stem, _, count = match.groups()
    parts = [
        gguf.with_name(f"{stem}-{number:05}-of-{count}.gguf")
        for number in range(1, min(int(count), _MOST_PARTS) + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or int(count) > _MOST_PARTS:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"{gguf} is one of {int(count)} parts, and {(missing or ['no name'])[0]}{more} is "
            "missing beside it; download all parts into one folder"
        )
    return parts


def _opened(paths: Sequence[Path]) -> list[GgufFile]:
    """The parts of a model, each found to say that it is the part it is named as."""
    files = [GgufFile(path) for path in paths]
    for number, file in enumerate(files):
        place, count = file.metadata.get("split.no", 0), file.metadata.get("split.count", 0)
        if place != number or count not in (len(files), 0 if len(files) == 1 else len(files)):
            _refuse(
                file,
                f"it says that it is part {place!r:.20} (from 0) of {count!r:.20}, and is named "
                f"as part {number} of {len(files)}; name the first part of a whole set",
            )
    return files


def _all_tensors(files: Sequence[GgufFile]) -> dict[str, tuple[GgufFile, GgufTensor]]:
    found: dict[str, tuple[GgufFile, GgufTensor]] = {}
    for file in files:
        if twice := found.keys() & file.tensors.keys():
            _refuse(file, f"tensor {min(twice)!r:.80} is in another part as well")
        found |= {name: (file, tensor) for name, tensor in file.tensors.items()}
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------- config


def _family(file: GgufFile) -> tuple[Family, Gguf, GgufFields]:
    """The family and the fields of a file's model; unknown fields are refused."""
    architecture = file.metadata.get(_ARCHITECTURE)
    prefix = f"{architecture}."
    num_experts = file.metadata.get(prefix + _EXPERTS, 0)
    is_dense = type(num_experts) is int and num_experts == 0
    family = family_of_gguf(architecture, not is_dense, file.metadata)
    if family is None or family.gguf is None:
        _refuse(file, f"models of the family {architecture!r:.80} are not read from GGUF files yet")
    only = {prefix + key: value for key, value in family.gguf.only.items()}
    known = GgufFields.keys() | _SAY_NOTHING | {*family.gguf.keys.values()} | family.gguf.ignored
    for key, value in file.metadata.items():
        is_known = key.removeprefix(prefix) in known
        if key in only:
            is_known = type(value) is type(only[key]) and value == only[key]
        if key.startswith(prefix) and not is_known:
            _refuse(file, f"what {key!r:.80} asks for is not implemented for GGUF files")
    return family, family.gguf, parse_fields(file.path, file.metadata, GgufFields, prefix)


def _refuse_unknown_of_tokenizer(file: GgufFile) -> None:
    """Refuse unknown fields of a file about its tokenizer: they could change ids."""
    known = GgufTokenizerFields.keys() | set(map(TOKENIZER_KEY.format, _SAY_NOTHING_OF_TOKENS))
    others, may_be = TOKENIZER_KEY.format(""), TOKENIZER_KEY.format("fim_")
    for key, value in file.metadata.items():
        if not key.startswith(others) or key.startswith(may_be) or key in known or value is False:
            continue
        _refuse(file, f"what {key!r:.80} asks of the tokenizer is not implemented for GGUF files")


def _refuse(file: GgufFile, what: str) -> NoReturn:
    raise ModelLoadError(f"{file.path}: {what}; or get the model as safetensors")


def _config(file: GgufFile, tokenizer: GgufTokenizerFields, tensors: _Tensors) -> dict[str, Any]:
    """``config.json`` in the hub's own spelling, which transformers and foredraft both read."""
    family, gguf, fields = _family(file)
    head_dim = fields.key_length or fields.embedding_length // fields.head_count
    rotated = fields.rope_dimension_count or head_dim
    is_part = rotated < head_dim and "partial_rotary_factor" in family.heeds
    is_whole = fields.value_length in (None, head_dim) and (is_part or rotated == head_dim)
    if not (is_whole or family.names.latent_up):
        _refuse(file, "heads whose keys, values and rotated parts differ in size are not read")
    has_local = "rope_local_base_freq" in gguf.keys
    if not has_local and fields.local_rope_theta not in (None, fields.rope_theta):
        _refuse(file, "rotary embeddings of windowed layers that have another base are not read")
    config = {
        "model_type": family.model_type,
        "vocab_size": len(tokenizer.tokens),
        "hidden_size": fields.embedding_length,
        "intermediate_size": fields.feed_forward_length,
        "num_hidden_layers": fields.block_count - _num_drafting_layers(file),
        "num_attention_heads": fields.head_count,
        "num_key_value_heads": fields.head_count_kv or fields.head_count,
        "head_dim": head_dim,
        "max_position_embeddings": fields.context_length,
        "rms_norm_eps": fields.rms_norm_eps and _shortest(fields.rms_norm_eps),
        "rope_theta": _shortest(fields.rope_theta),
        "tie_word_embeddings": "output.weight" not in tensors,
        **{key: id for key, id in tokenizer.special_ids().items() if key != "unk_token_id"},
        "torch_dtype": "bfloat16",
        **_said_by_family(file, family, gguf, tensors),
        **_scaling(file, fields, rotated, {} if family.has_wide_heads else tensors),
    }
    if is_part:
        share = rotated / head_dim  # readers multiply by it and round down
        is_below = int(head_dim * share) < rotated
        config["partial_rotary_factor"] = math.nextafter(share, 1) if is_below else share
    if fields.original_context and "original_max_position_embeddings" in family.heeds:
        config["original_max_position_embeddings"] = fields.original_context
    if gguf.wide_size:
        is_wide = fields.block_count == gguf.wide_size
        size = fields.embedding_length // fields.head_count if is_wide else head_dim
        config["query_pre_attn_scalar"] = size
    if "rope_scaling" in config:
        config["rope_scaling"] |= gguf.rope
    if family.has_wide_heads:
        config |= _of_wide_heads(file, config, tensors)
    if family.names.latent_up:
        config |= _of_latents(file, fields, config)
    if "layer_types" in config:
        del config["layer_types"][config["num_hidden_layers"] :]
    if fields.rms_norm_eps is None:
        del config["rms_norm_eps"]
    parse_fields(file.path, config, DecoderFields)  # sizes that do not fit together
    return config


def _said_by_family(
    file: GgufFile, family: Family, gguf: Gguf, tensors: _Tensors
) -> dict[str, Any]:
    """Fields that only some families have."""
    found, prefix = dict(gguf.implied), f"{file.metadata[_ARCHITECTURE]}."
    for name, key in gguf.keys.items():
        value = file.metadata.get(prefix + key)
        if isinstance(value, float):
            found[name] = _shortest(value)
        elif isinstance(value, np.ndarray) and name in _SPECIAL_LAYERS:
            kinds = ("full_attention", _SPECIAL_LAYERS[name])
            found["layer_types"] = [kinds[bool(is_special)] for is_special in value[: len(tensors)]]
        elif value is not None:
            is_nothing = type(value) is int and value == 0 and key not in _MAY_BE_0
            found[name] = None if is_nothing else value
    heads = file.metadata.get(f"{prefix}attention.head_count_kv")
    if isinstance(heads, np.ndarray) and not family.has_wide_heads:
        if not family.recurrent:
            _refuse(file, "attention.head_count_kv is array; its layers must have the same heads")
        names = (RECURRENT_TYPES[family.recurrent][0], "full_attention")
        found["layer_types"] = [names[bool(count)] for count in heads[: len(tensors)]]
        fed = file.metadata.get(f"{prefix}feed_forward_length")
        if family.has_single_parts and isinstance(fed, np.ndarray):
            alone = "moe" if found.get("n_routed_experts") else "mlp"
            both = zip(found["layer_types"], fed, strict=False)
            found["layer_types"] = [alone if size else kind for kind, size in both]
    for name, end in _SAID_BY_TENSORS.items():
        if name in family.heeds:
            found[name] = any(tensor.endswith(end) for tensor in tensors)
    return found


def _of_latents(file: GgufFile, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of latent attention, of which files have sums of sizes, and yarn's factor anew.

    In older files the lengths are those of heads, and in newer ones those of the cache.
    """
    both = config.get("qk_nope_head_dim", fields.key_length)
    rotated, value = config.get("qk_rope_head_dim"), config.get("v_head_dim", fields.value_length)
    if not (config.get("kv_lora_rank") and {*map(type, (both, rotated, value))} == {int}):
        _refuse(file, "sizes of its latent attention are missing")
    found: dict[str, Any] = {"qk_nope_head_dim": both - rotated, "v_head_dim": value}
    weight = file.metadata.get(f"{file.metadata[_ARCHITECTURE]}.{_YARN_WEIGHT}")
    if isinstance(weight, float) and weight and "rope_scaling" in config:
        scales = dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * weight, 6))
        found["rope_scaling"] = config["rope_scaling"] | scales
    return found


def _of_wide_heads(file: GgufFile, config: Mapping[str, Any], tensors: _Tensors) -> dict[str, Any]:
    """Fields of Gemma 4, whose layers without windows have heads of their own."""
    own = f"{file.metadata[_ARCHITECTURE]}."
    said = {key.removeprefix(own): x for key, x in file.metadata.items() if key.startswith(own)}
    kinds, given = config.get("layer_types", []), said.get("attention.head_count_kv")
    heads = given.tolist() if isinstance(given, np.ndarray) else [given] * len(kinds)
    by_kind = dict(zip(kinds, heads, strict=False))
    parts = ("attention.value_length_swa", "rope.dimension_count_swa")
    are_whole = {str(said.get(part)) for part in parts} == {str(config["head_dim"])}
    if [by_kind.get(kind) for kind in kinds] != heads or not are_whole:
        _refuse(file, "heads that differ between layers of a kind, or in their parts, are not read")
    if kinds[config["num_hidden_layers"] - 1 :] != ["full_attention"]:
        _refuse(file, "layers of which the last has a window, or no kind, are not read")
    full = (f"blk.{i}.attn_" for i, kind in enumerate(kinds) if kind == "full_attention")
    width = int(np.min(said["feed_forward_length"]))
    return {
        "num_key_value_heads": by_kind.get("sliding_attention"),
        "num_global_key_value_heads": by_kind["full_attention"],
        "attention_k_eq_v": any(
            f"{layer}k.weight" in tensors and f"{layer}v.weight" not in tensors for layer in full
        ),
        "intermediate_size": width,
        "use_double_wide_mlp": width < config["intermediate_size"],
        "enable_moe_block": config["num_experts"] != 0,
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": _rope_of_wide_heads(file, config, tensors),
    }


def _rope_of_wide_heads(
    file: GgufFile, config: Mapping[str, Any], tensors: _Tensors
) -> dict[str, Any]:
    """Layers without windows turn a share of the pairs; files divide the others by much."""
    if _ROTARY_FACTORS not in tensors or "rope_scaling" in config:
        _refuse(file, f"rotary embedding without {_ROTARY_FACTORS}, or with a scaling, is not read")
    factors = _factors(*tensors[_ROTARY_FACTORS], config.get("global_head_dim", 0))
    turning = factors.count(1.0)
    share, still = turning / len(factors), [_STILL] * (len(factors) - turning)
    if not turning or factors[turning:] != still or int(share * len(factors)) != turning:
        _refuse(file, f"factors of rotary embedding other than 1 and then {_STILL} are not read")
    local = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 1e4)}
    whole = {"rope_type": "proportional", "partial_rotary_factor": share}
    return {
        "full_attention": whole | {"rope_theta": config["rope_theta"]},
        "sliding_attention": local,
    }


def _num_drafting_layers(file: GgufFile) -> int:
    """Layers behind the model's own, which predict further tokens; the first of them drafts."""
    found = file.metadata.get(f"{file.metadata.get(_ARCHITECTURE)}.nextn_predict_layers", 0)
    return found if type(found) is int and found >= 0 else 0


def _shortest(number: float) -> float:
    """GGUF holds the float32 nearest to 1e-05; the fewest digits that name it are the number."""
    return float(str(np.float32(number)))


def _scaling(file: GgufFile, fields: GgufFields, rotated: int, tensors: _Tensors) -> dict[str, Any]:
    """Rotary scaling: of linear and yarn its parameters, of llama3 and longrope its factors."""
    kinds = [name for name in (_ROTARY_FACTORS, _SHORT_FACTORS, _LONG_FACTORS) if name in tensors]
    factors = {name: _factors(*tensors[name], rotated) for name in kinds}
    found: dict[str, Any] = {"rope_type": fields.scaling_type, "factor": fields.scaling_factor}
    is_plain = fields.scaling_type == "none" or (
        fields.scaling_type == "linear" and fields.scaling_factor == 1
    )
    is_long = is_plain or fields.scaling_type == "longrope"
    if kinds == [_SHORT_FACTORS, _LONG_FACTORS] and is_long:
        short, long = factors.values()
        found = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        found["attention_factor"] = fields.attention_factor
    elif kinds == [_ROTARY_FACTORS] and is_plain:
        found = _llama3(file, fields.rope_theta, factors[_ROTARY_FACTORS], rotated)
    elif kinds or fields.scaling_type == "longrope":
        _refuse(
            file, f"rotary scaling {fields.scaling_type!r} with the tensors {kinds} is not read"
        )
    elif is_plain:
        return {}
    elif fields.scaling_type == "yarn":
        found |= {"beta_fast": fields.beta_fast, "beta_slow": fields.beta_slow}
        if fields.attention_factor not in (None, 1.0):  # llama.cpp multiplies yarn's own with it
            own = 0.1 * math.log(fields.scaling_factor) + 1.0
            found["attention_factor"] = own * fields.attention_factor
    elif fields.attention_factor not in (None, 1.0):
        _refuse(file, f"an attention factor of rotary scaling {fields.scaling_type!r} is not read")
    if fields.original_context and found["rope_type"] != "linear":
        found.setdefault("original_max_position_embeddings", fields.original_context)
    return {"rope_scaling": {key: value for key, value in found.items() if value is not None}}


def _factors(file: GgufFile, tensor: GgufTensor, rotated: int) -> list[float]:
    """Divisor of the frequency of each rotated pair."""
    if tensor.shape != (rotated // 2,):
        _refuse(file, f"{tensor.name} has shape {tensor.shape}, and {rotated} numbers are rotated")
    return [_shortest(factor) for factor in file.weights(tensor).tolist()]


def _llama3(file: GgufFile, theta: float, factors: list[float], rotated: int) -> dict[str, Any]:
    """The scaling of Llama 3: files hold its factors, not their parameters."""
    from foredraft.models.native.config import RotaryEmbedding

    factor = float(f"{max(factors):.6g}")  # computed in float32
    found: dict[str, Any] = {"rope_type": "llama3", "factor": factor, **_LLAMA_3}
    plain = RotaryEmbedding(theta, rotated)
    scaled = replace(plain, fields=RopeFields.model_construct(**found))
    expected = plain.inverse_frequencies() / scaled.inverse_frequencies()
    if not np.allclose(factors, expected.numpy(), rtol=1e-4):
        _refuse(file, f"the factors of its rotary embedding ({_ROTARY_FACTORS}) are not Llama 3's")
    return found


# ---------------------------------------------------------------------------------------- weights


def _weights(file: GgufFile, tensors: _Tensors, config: DecoderConfig) -> dict[str, StoredTensor]:
    """The tensors of the model, which the files hold and no others; experts one by one."""
    from foredraft.models.native.mtp import shapes_behind
    from foredraft.models.native.weights import asked_shapes, without_ones

    shapes = asked_shapes(config)
    if config.latent and f"blk.0.{_KEYS_AND_VALUES}.weight" in tensors:
        shapes = _with_keys_and_values(shapes, config.latent, config.num_attention_heads)
    ours = _names(config, shapes)
    fused = dict[str, tuple[str, ...]]()  # of each expert the gates, then what they gate
    for name in tensors:
        both = [name.replace("_gate_up_", f"_{part}_") for part in ("gate", "up")]
        if name not in both and {*both} <= ours.keys():
            fused[name] = ours.pop(both[0]), ours.pop(both[1])
            ours[name] = fused[name][0]
    if missing := sorted(ours.keys() - tensors):
        _refuse(file, f"tensor {missing[0]!r} is missing; get the whole file again")
    is_whole = config.num_attending_layers and not config.family.has_single_parts
    if _num_drafting_layers(file) and is_whole:
        behind = shapes_behind(config)
        if (own := _names(config, behind)).keys() <= tensors.keys():
            shapes, ours = {**shapes, **behind}, ours | own
    factors = {_ROTARY_FACTORS, _SHORT_FACTORS, _LONG_FACTORS}
    drafting = tuple(
        f"blk.{config.num_hidden_layers + number}." for number in range(_num_drafting_layers(file))
    )
    unread = {  # of layers that read another's entries
        f"blk.{layer}.{part}.weight"
        for layer, kind in enumerate(config.kinds)
        if kind.source is not None
        for part in ("attn_k", "attn_v", "attn_k_norm")
    }
    unknown = sorted(tensors.keys() - ours - factors - unread)
    if unknown := [name for name in unknown if not name.startswith(drafting)]:
        _refuse(file, f"tensor {unknown[0]!r:.80} belongs to a feature that is not implemented")
    found: dict[str, StoredTensor] = {}
    for name, (source, tensor) in tensors.items():
        if name not in ours:
            continue
        shape, each, count = shapes[ours[name].format(expert=0)], tensor.shape, 1
        parts = fused.get(name, (ours[name],))
        if config.experts and "{expert}" in ours[name]:  # one behind the other
            count, each = config.experts.count - config.experts.num_shared, shape
            shape, count = (count, len(parts) * each[0], *each[1:]), count * len(parts)
        is_flat = len(shape) == 2 and (prod(each[:-1]), each[-1]) == shape
        if is_flat or (len(shape) == 1 and prod(each) == shape[0]):  # by head, or group of a norm
            each = shape
        elif without_ones(tensor.shape) != without_ones(shape):
            _refuse(file, f"tensor {name!r} has shape {tensor.shape}, not {shape}")
        place = _place(config, name, tensor)
        for number in range(count):
            part = replace(place, start=tensor.start + number * (tensor.num_bytes // count))
            stored = StoredTensor(source.path, tensor.kind.name, each, part)
            expert, which = divmod(number, len(parts))
            found[parts[which].format(expert=expert)] = stored
    return found


def _with_keys_and_values(
    shapes: Mapping[str, tuple[int, ...]], sizes: Latent, heads: int
) -> dict[str, tuple[int, ...]]:
    """The same where one tensor makes keys and values of latents."""
    whole = heads * (sizes.still + sizes.value_size), sizes.rank
    both = {name.replace(".v_b_", ".kv_b_"): whole for name in shapes if ".v_b_" in name}
    return both | {n: shape for n, shape in shapes.items() if not re.search(r"\.[kv]_b_", n)}


def _place(config: DecoderConfig, name: str, tensor: GgufTensor) -> GgufPlace:
    """A tensor's place, with what llama.cpp changed in its numbers."""
    part, family = name.rpartition(".")[0].rpartition(".")[2], config.family
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    is_paired = family.gguf is not None and family.gguf.is_paired
    norms = (*_gguf_norms(config).values(), "enorm", "hnorm", "shared_head_norm")
    return GgufPlace(
        tensor.kind,
        tensor.start,
        heads.get(part, 0) if is_paired else 0,
        family.norm_offset if part in norms else 0.0,
        is_log=name.endswith("ssm_a"),
    )


def _names(config: DecoderConfig, asked: Mapping[str, object]) -> dict[str, str]:
    """The names in transformers of the tensors that are asked for, by their names in GGUF."""
    names, norms = config.family.names, _gguf_norms(config)
    found = {
        "token_embd.weight": "model.embed_tokens.weight",
        f"{norms['final_norm']}.weight": f"{names.final_norm}.weight",
        f"{norms['final_norm']}.bias": f"{names.final_norm}.bias",
        "output.weight": "lm_head.weight",
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    }
    of_layer = [(ours, theirs) for ours, theirs in _names_of_layer(config) if ours]
    of_layer += _DRAFTING.items()
    for layer in range(config.num_hidden_layers + 1):
        for ours, theirs in of_layer:
            for kind in ("", ".weight", ".bias"):
                found[f"blk.{layer}.{theirs}{kind}"] = f"model.layers.{layer}.{ours}{kind}"
    return {theirs: ours for theirs, ours in found.items() if ours.format(expert=0) in asked}


def _names_of_layer(config: DecoderConfig) -> Iterator[tuple[str, str]]:
    """Names of a layer's tensors in transformers and in GGUF, without ``.weight`` or ``.bias``."""
    names, norms = config.family.names.apart, _gguf_norms(config)
    if not config.experts and names.dense_down:
        names = replace(names, gate_up=names.dense_gate_up, down=names.dense_down, router="")
    if config.family.mixes_beside:  # Falcon-H1, whose files leave ".weight" out here
        names = replace(names, mlp_norm=f"{names.mlp_norm}.weight")
    yield from ((getattr(names, norm), norms[norm]) for norm in GGUF_NORMS)
    qkv = ["attn_q", "attn_k", "attn_v"] if len(names.qkv) > 1 else ["attn_qkv"]
    if names.latent_up:
        qkv = ["attn_q", "attn_kv_a_mqa"]
        yield from ((names.query_low, "attn_q_a"), (names.query_up, "attn_q_b"))
        yield from zip(names.latent_up, ("attn_k_b", "attn_v_b"), strict=True)
        yield config.family.names.latent_up[0], _KEYS_AND_VALUES
    yield from zip(names.qkv, qkv, strict=True)
    yield names.output, "attn_output"
    end = "_exps" if config.experts else ""
    upper = ("ffn_gate", "ffn_up") if len(names.gate_up) > 1 else ("ffn_up",)
    yield names.router, "ffn_gate_inp"
    yield from ((ours, f"{theirs}{end}") for ours, theirs in zip(names.gate_up, upper, strict=True))
    yield names.down, f"ffn_down{end}"
    if config.experts:
        yield names.expert_factors, "ffn_down_exps.scale"
        if config.experts.num_dense or config.dense_beside:
            yield from zip(names.dense_gate_up, ("ffn_gate", "ffn_up"), strict=True)
            yield names.dense_down, "ffn_down"
        shared = (f"{one}_shexp" for one in upper)
        yield from zip(names.shared_gate_up, shared, strict=False)
        yield names.shared_down, "ffn_down_shexp"
        yield names.shared_router, "ffn_gate_inp_shexp"
        if names.router_bias != f"{names.router}.bias":
            yield names.router_bias, "exp_probs_b.bias"
    yield names.sinks, "attn_sinks.weight"
    yield names.factor, "layer_output_scale.weight"
    yield from ((names.input_gate, "inp_gate"), (names.input_output, "proj"))
    if config.recurrent and config.recurrent.kind == "short_conv":
        yield names.recurrent_in[0], "shortconv.in_proj"
        yield names.convolution, "shortconv.conv"
        yield names.recurrent_out, "shortconv.out_proj"
    elif config.recurrent:
        mixer = names.convolution.rpartition(".")[0]
        inputs = ("attn_qkv", "attn_gate") if len(names.recurrent_in) > 1 else ("ssm_in",)
        yield from zip(names.recurrent_in, inputs, strict=True)
        gates = ("ssm_beta", "ssm_alpha") if len(names.recurrent_gates) > 1 else ("ssm_ba",)
        yield from zip(names.recurrent_gates, gates, strict=False)
        yield names.convolution, "ssm_conv1d"
        yield names.recurrent_norm, "ssm_norm"
        yield names.recurrent_out, "ssm_out"
        yield f"{mixer}.A_log", "ssm_a"
        yield f"{mixer}.D", "ssm_d"
        yield f"{mixer}.dt_bias", "ssm_dt.bias"


def _gguf_norms(config: DecoderConfig) -> Mapping[str, str]:
    own = config.family.gguf.norms if config.family.gguf else {}
    return {"final_norm": "output_norm", **GGUF_NORMS, **own}


def _floats(name: str, weight: StoredTensor) -> torch.Tensor:
    """Numbers in the narrowest type that says the same; bfloat16 of quantised ones."""
    import torch

    exact = read_tensor(weight, name).float()
    rounded = exact.bfloat16()
    if weight.is_quantised or torch.equal(rounded.float(), exact):
        return rounded
    return exact.half() if weight.dtype == "F16" else exact


def _write_blocks(weights: Mapping[str, StoredTensor], into: Path) -> None:
    """Keep the integers themselves, where the kernels have such blocks."""
    from foredraft.models.native.quant import INT4, INT8
    from foredraft.models.native.source_blocks import FILE, save_blocks
    from foredraft.models.native.weights import unpacked

    forms = {"Q4_0": INT4, "Q4_1": INT4, "Q8_0": INT8}
    kept = {
        name: unpacked(BY_NAME[weight.dtype], read_blocks(weight), forms[weight.dtype])
        for name, weight in weights.items()
        if weight.dtype in forms and len(weight.shape) == 2
    }
    if kept:  # blocks that do not give the weights are not used
        save_blocks(into, kept)
        (into / FILE).chmod((into / "config.json").stat().st_mode)
