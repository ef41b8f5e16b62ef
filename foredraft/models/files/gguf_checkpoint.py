"""A GGUF file as a checkpoint in the hub's own form: config, tokenizer and an index of tensors.

The weights stay in the file, or are written as safetensors for code that reads nothing else.
`foredraft.models.families` holds GGUF's names of the fields and tensors of a family. A field that
is not known there is refused by name: a model that runs with half of its features gives wrong
text.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from foredraft.core.errors import ModelLoadError
from foredraft.models.families import GGUF_NORMS, RECURRENT_TYPES, Family, family_of_gguf
from foredraft.models.files.gguf import GgufFile, GgufTensor
from foredraft.models.files.gguf_blocks import Bytes, Kind
from foredraft.models.files.gguf_tokenizer import write_tokenizer
from foredraft.models.files.json_files import parse_fields
from foredraft.models.files.safety import GGUF_INDEX
from foredraft.models.files.schema import (
    DecoderFields,
    GgufFields,
    GgufSamplingFields,
    GgufTokenizerFields,
)
from foredraft.models.files.stored import half_split_rows

if TYPE_CHECKING:
    import torch

    from foredraft.models.files.progress import Progress
    from foredraft.models.native.config import DecoderConfig
    from foredraft.models.native.quant import Blocks
    from foredraft.models.native.recurrent import Recurrent

RECIPE = "GGUF converter 4"
"""Raise it when conversions change: older copies are converted again."""
_MOST_BYTES = 2 << 30
"""Largest file of weights; a conversion holds one file in memory."""
_ARCHITECTURE, _EXPERTS = "general.architecture", "expert_count"
_SAY_NOTHING = {"vocab_size", "rope.scaling.finetuned", "expert_used_count"}
"""Keys without effect on a model's computation, if its family does not read them."""

_TOKENIZER = "tokenizer.ggml."
_SAY_NOTHING_OF_TOKENS = {
    "token_type_count",  # of BERT's segments
    "hf_json",  # the file's other keys say the same
    *("cls_token_id", "mask_token_id", "sep_token_id", "seperator_token_id", "prefix_token_id"),
    *("suffix_token_id", "middle_token_id", "cls_token_type"),
}
"""Keys of the tokenizer that change no ids of a text; as do those of `fim_*` tokens."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MOST_PARTS = 1000

_ROTARY_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""Divisors of the frequencies of rotary embedding: for any text, or of longrope."""
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class _Weight:
    """A tensor of the file under its name in transformers.

    Attributes:
        name: with ``{expert}`` for the number of an expert, where the tensor holds all of them.
        heads: of queries and keys, whose rows llama.cpp orders in its own way; 0: others.
        added: constant that was added to the file's numbers.
        is_log: the file has negative exponentials of the numbers.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    added: float = 0.0
    is_log: bool = False


_Found = tuple[GgufFile, GgufTensor, _Weight]
"""A tensor of the model: its file, its location there, and its kind."""


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
        weight.name: {
            "file": links[file.path],
            "kind": tensor.kind.name,
            "shape": list(tensor.shape),
            "start": tensor.start,
            "heads": weight.heads,
            "added": weight.added,
            "is_log": weight.is_log,
        }
        for file, tensor, weight in weights
    }
    _write_json(into / GGUF_INDEX, {"files": [*links.values()], "tensors": tensors})
    progress.advance(1.0)


def write_checkpoint(gguf: Path, into: Path, progress: Progress) -> None:
    """Write all files of a checkpoint into the directory ``into``.

    Floats stay as they are (as bfloat16 where that says the same); quantised weights are rounded
    to bfloat16, and the blocks of formats that the kernels have are kept beside them.

    Args:
        gguf: the file; of a split one the first part, beside the others.

    Raises:
        ModelLoadError: the file is damaged, or holds a model that is not known here.
    """
    progress.stage("converting the tokenizer")
    weights = _write_description(_opened(parts_of(gguf)), into)
    progress.stage("converting the weights to safetensors")
    _write_weights(weights, into, progress)
    _write_blocks(weights, into)


def _write_description(files: Sequence[GgufFile], into: Path) -> list[_Found]:
    """Write all but the weights; where each of these is found."""
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
    sampling = parse_fields(first.path, first.metadata, GgufSamplingFields)
    named = sampling.model_dump(exclude_none=True)
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


def bytes_needed(gguf: Path) -> int:
    """Upper estimate of the bytes that `write_checkpoint` writes.

    Raises:
        ModelLoadError: the file is damaged.
    """
    tensors = [tensor for part in parts_of(gguf) for tensor in GgufFile(part).tensors.values()]
    return sum(2 * prod(tensor.shape) + tensor.num_bytes for tensor in tensors)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------- config


def _family(file: GgufFile) -> tuple[Family, GgufFields]:
    """The family and the fields of a file's model; unknown fields are refused."""
    architecture = file.metadata.get(_ARCHITECTURE)
    prefix = f"{architecture}."
    num_experts = file.metadata.get(prefix + _EXPERTS, 0)
    is_dense = type(num_experts) is int and num_experts == 0
    family = family_of_gguf(architecture, not is_dense)
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
    return family, parse_fields(file.path, file.metadata, GgufFields, prefix)


def _refuse_unknown_of_tokenizer(file: GgufFile) -> None:
    """Refuse unknown fields of a file about its tokenizer: they could change ids."""
    known = {
        str(field.validation_alias).removeprefix(_TOKENIZER)
        for field in GgufTokenizerFields.model_fields.values()
    } | _SAY_NOTHING_OF_TOKENS
    for key, value in file.metadata.items():
        name = key.removeprefix(_TOKENIZER)
        is_off = isinstance(value, bool) and not value
        if key == name or name in known or name.startswith("fim_") or is_off:
            continue
        _refuse(file, f"what {key!r:.80} asks of the tokenizer is not implemented for GGUF files")


def _refuse(file: GgufFile, what: str) -> NoReturn:
    raise ModelLoadError(f"{file.path}: {what}; or get the model as safetensors")


def _config(
    file: GgufFile,
    tokenizer: GgufTokenizerFields,
    tensors: Mapping[str, tuple[GgufFile, GgufTensor]],
) -> dict[str, Any]:
    """``config.json`` in the hub's own spelling, which transformers and foredraft both read."""
    family, fields = _family(file)
    head_dim = fields.key_length or fields.embedding_length // fields.head_count
    rotated = fields.rope_dimension_count or head_dim
    is_part = rotated < head_dim and "partial_rotary_factor" in family.reads
    if fields.value_length not in (None, head_dim) or not (is_part or rotated == head_dim):
        _refuse(file, "heads whose keys, values and rotated parts differ in size are not read")
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
        "rms_norm_eps": _shortest(fields.rms_norm_eps),
        "rope_theta": _shortest(fields.rope_theta),
        "tie_word_embeddings": "output.weight" not in tensors,
        **{key: id for key, id in tokenizer.special_ids().items() if key != "unk_token_id"},
        "torch_dtype": "bfloat16",
        **_said_by_family(file, family, tensors),
        **_scaling(file, fields, rotated, tensors),
    }
    if is_part:
        share = rotated / head_dim  # readers multiply by it and round down
        is_below = int(head_dim * share) < rotated
        config["partial_rotary_factor"] = math.nextafter(share, 1) if is_below else share
    if fields.original_context and "original_max_position_embeddings" in family.reads:
        config["original_max_position_embeddings"] = fields.original_context
    if family.gguf and family.gguf.wide_size:
        is_wide = fields.block_count == family.gguf.wide_size
        size = fields.embedding_length // fields.head_count if is_wide else head_dim
        config["query_pre_attn_scalar"] = size
    parse_fields(file.path, config, DecoderFields)  # sizes that do not fit together
    return config


def _said_by_family(
    file: GgufFile, family: Family, tensors: Mapping[str, tuple[GgufFile, GgufTensor]]
) -> dict[str, Any]:
    """Fields that only some families have."""
    assert family.gguf is not None
    found = dict(family.gguf.implied)
    for name, key in family.gguf.keys.items():
        value = file.metadata.get(f"{family.gguf.architecture}.{key}")
        if isinstance(value, float):
            found[name] = _shortest(value)
        elif isinstance(value, np.ndarray) and name == "sliding_window_pattern":
            kinds = ("full_attention", "sliding_attention")
            found["layer_types"] = [kinds[bool(is_local)] for is_local in value[: len(tensors)]]
        elif value is not None:
            found[name] = None if type(value) is int and value == 0 else value
    heads = file.metadata.get(f"{family.gguf.architecture}.attention.head_count_kv")
    if isinstance(heads, np.ndarray):
        if not family.recurrent:
            _refuse(file, "attention.head_count_kv is array; its layers must have the same heads")
        names = (RECURRENT_TYPES[family.recurrent][0], "full_attention")
        found["layer_types"] = [names[bool(count)] for count in heads[: len(tensors)]]
    if "attention_bias" in family.reads:
        found["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return found


def _num_drafting_layers(file: GgufFile) -> int:
    """Layers behind the model's own, which predict further tokens; they are not read."""
    found = file.metadata.get(f"{file.metadata.get(_ARCHITECTURE)}.nextn_predict_layers", 0)
    return found if type(found) is int and found >= 0 else 0


def _shortest(number: float) -> float:
    """GGUF holds the float32 nearest to 1e-05; the fewest digits that name it are the number."""
    return float(str(np.float32(number)))


def _scaling(
    file: GgufFile,
    fields: GgufFields,
    rotated: int,
    tensors: Mapping[str, tuple[GgufFile, GgufTensor]],
) -> dict[str, Any]:
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
    factor = float(f"{max(factors):.6g}")  # computed in float32
    if not np.allclose(factors, _llama3_factors(factor, theta, rotated), rtol=1e-4):
        _refuse(file, f"the factors of its rotary embedding ({_ROTARY_FACTORS}) are not Llama 3's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA_3}


def _llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray[Any, Any]:
    """Slow frequencies are divided by ``factor``, fast ones by 1, those between by between."""
    low, high, context = _LLAMA_3.values()
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = context * frequencies / (2 * np.pi)
    is_fast = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / (is_fast + (1 - is_fast) / factor)


# ---------------------------------------------------------------------------------------- weights


def _weights(
    file: GgufFile, tensors: Mapping[str, tuple[GgufFile, GgufTensor]], config: DecoderConfig
) -> list[_Found]:
    """The tensors of the model, which the files hold and no others."""
    expected = _layout(config)
    if missing := sorted(expected.keys() - tensors):
        _refuse(file, f"tensor {missing[0]!r} is missing; get the whole file again")
    factors = {_ROTARY_FACTORS, _SHORT_FACTORS, _LONG_FACTORS}
    drafting = tuple(
        f"blk.{config.num_hidden_layers + number}." for number in range(_num_drafting_layers(file))
    )
    unknown = sorted(tensors.keys() - expected - factors)
    if unknown := [name for name in unknown if not name.startswith(drafting)]:
        _refuse(file, f"tensor {unknown[0]!r:.80} belongs to a feature that is not implemented")
    for name, weight in expected.items():
        if (shape := tensors[name][1].shape) != weight.shape:
            _refuse(file, f"tensor {name!r} has shape {shape}, not {weight.shape}")
    named = ((*tensors[name], expected[name]) for name in tensors if name in expected)
    return [part for found in named for part in _apart(*found)]


def _apart(file: GgufFile, tensor: GgufTensor, weight: _Weight) -> Iterator[_Found]:
    """The matrices of single experts, which are stored consecutively; others as they are."""
    if "{expert}" not in weight.name:
        yield file, tensor, weight
        return
    count, *shape = tensor.shape
    num_bytes = tensor.num_bytes // count
    for expert in range(count):
        part = replace(tensor, shape=tuple(shape), start=tensor.start + expert * num_bytes)
        yield file, part, replace(weight, name=weight.name.format(expert=expert))


def _layout(config: DecoderConfig) -> dict[str, _Weight]:
    """All tensors of a model of this config, by their names in GGUF."""
    hidden, vocab = config.hidden_size, config.vocab_size
    found = {
        "token_embd.weight": _Weight("model.embed_tokens.weight", (vocab, hidden)),
        f"{_norm_names(config)['final_norm']}.weight": _Weight(
            f"{config.family.names.final_norm}.weight", (hidden,), added=config.family.norm_offset
        ),
    }
    if not config.tie_word_embeddings:
        found["output.weight"] = _Weight("lm_head.weight", (vocab, hidden))
    of_layer = _norms(config) | _attention(config) | _feed_forward(config)
    recurrent = of_layer
    if config.recurrent is not None:
        is_norm = {f"{_norm_names(config)[norm]}.weight" for norm in ("query_norm", "key_norm")}
        recurrent = _norms(config) | _mixer(config, config.recurrent) | _feed_forward(config)
        recurrent = {name: weight for name, weight in recurrent.items() if name not in is_norm}
    for layer in range(config.num_hidden_layers):
        found_here = recurrent if config.kind(layer).is_recurrent else of_layer
        for name, weight in found_here.items():
            ours = f"model.layers.{layer}.{weight.name}"
            found[f"blk.{layer}.{name}"] = replace(weight, name=ours)
    return found


def _norms(config: DecoderConfig) -> dict[str, _Weight]:
    """Norms of a layer."""
    names, offset = vars(config.family.names), config.family.norm_offset
    sizes = dict.fromkeys(GGUF_NORMS, config.hidden_size)
    sizes |= zip(("query_norm", "key_norm"), config.head_norm_sizes, strict=False)
    theirs = _norm_names(config)
    return {
        f"{theirs[norm]}.weight": _Weight(f"{names[norm]}.weight", (sizes[norm],), added=offset)
        for norm in GGUF_NORMS
        if names[norm] is not None
    }


def _norm_names(config: DecoderConfig) -> Mapping[str, str]:
    own = config.family.gguf.norms if config.family.gguf else {}
    return {"final_norm": "output_norm", **GGUF_NORMS, **own}


def _mixer(config: DecoderConfig, sizes: Recurrent) -> dict[str, _Weight]:
    """Of a recurrent layer what is there in place of attention."""
    names, hidden = config.family.names, config.hidden_size
    channels, heads = sizes.channels, sizes.value_heads
    if sizes.kind == "short_conv":
        return {
            "shortconv.in_proj.weight": _Weight(
                f"{names.recurrent_in[0]}.weight", (sizes.num_inputs, hidden)
            ),
            "shortconv.conv.weight": _Weight(
                f"{names.convolution}.weight", (channels, sizes.window)
            ),
            "shortconv.out_proj.weight": _Weight(
                f"{names.recurrent_out}.weight", (hidden, channels)
            ),
        }
    inputs, gates = names.recurrent_in, names.recurrent_gates
    part = names.convolution.rpartition(".")[0]
    return {
        "attn_qkv.weight": _Weight(f"{inputs[0]}.weight", (channels, hidden)),
        "attn_gate.weight": _Weight(f"{inputs[1]}.weight", (sizes.num_outputs, hidden)),
        "ssm_beta.weight": _Weight(f"{gates[0]}.weight", (heads, hidden)),
        "ssm_alpha.weight": _Weight(f"{gates[1]}.weight", (heads, hidden)),
        "ssm_a": _Weight(f"{part}.A_log", (heads,), is_log=True),
        "ssm_dt.bias": _Weight(f"{part}.dt_bias", (heads,)),
        "ssm_conv1d.weight": _Weight(f"{names.convolution}.weight", (channels, sizes.window)),
        "ssm_norm.weight": _Weight(f"{names.recurrent_norm}.weight", (sizes.value_size,)),
        "ssm_out.weight": _Weight(f"{names.recurrent_out}.weight", (hidden, sizes.num_outputs)),
    }


def _attention(config: DecoderConfig) -> dict[str, _Weight]:
    """Matrices of a layer's attention, with the biases that some have."""
    names, hidden = config.family.names, config.hidden_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    rows = [config.query_rows, *(kv_heads * config.head_dim,) * 2]
    is_paired = config.family.gguf is not None and config.family.gguf.is_paired
    ordered = [heads, kv_heads, 0] if is_paired else [0, 0, 0]
    found: dict[str, _Weight] = {}
    qkv = ["attn_q", "attn_k", "attn_v"]
    if len(names.qkv) == 1:
        qkv, rows, ordered = ["attn_qkv"], [sum(rows)], [0]
    for theirs, ours, count, order in zip(qkv, names.qkv, rows, ordered, strict=True):
        found[f"{theirs}.weight"] = _Weight(f"{ours}.weight", (count, hidden), order)
        if config.attention_bias:
            found[f"{theirs}.bias"] = _Weight(f"{ours}.bias", (count,), order)
    output = (hidden, heads * config.head_dim)
    found["attn_output.weight"] = _Weight(f"{names.output}.weight", output)
    if config.output_bias:
        found["attn_output.bias"] = _Weight(f"{names.output}.bias", (hidden,))
    return found


def _feed_forward(config: DecoderConfig) -> dict[str, _Weight]:
    """Matrices of a layer's feed-forward part; all experts' are one tensor."""
    names, hidden, inner = config.family.names, config.hidden_size, config.intermediate_size
    found: dict[str, _Weight] = {}
    experts = () if config.experts is None else (config.experts.count,)
    end = "_exps" if experts else ""
    if experts:
        found["ffn_gate_inp.weight"] = _Weight(f"{names.router}.weight", (*experts, hidden))
    upper = ("ffn_gate", "ffn_up") if len(names.gate_up) > 1 else ("ffn_up",)
    shape = (*experts, 2 * inner // len(upper), hidden)
    for theirs, ours in zip(upper, names.gate_up, strict=True):
        found[f"{theirs}{end}.weight"] = _Weight(f"{ours}.weight", shape)
    found[f"ffn_down{end}.weight"] = _Weight(f"{names.down}.weight", (*experts, hidden, inner))
    return found


def _write_weights(weights: Sequence[_Found], into: Path, progress: Progress) -> None:
    """Into one file, or into several that fit into memory and an index of them."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    num_bytes = 0
    for done, (tensor, weight, blocks) in enumerate(_rows(weights), start=1):
        floats = _floats(tensor.kind, blocks, weight).reshape(tensor.shape)
        if tensors and num_bytes + floats.nbytes > _MOST_BYTES:
            name = f"model-{len(set(names.values())) + 1:05}.safetensors"
            names |= dict.fromkeys(tensors, name)
            _save(tensors, into / name)
            tensors, num_bytes = {}, 0
        tensors[weight.name] = floats
        num_bytes += floats.nbytes
        progress.advance(done / len(weights))
    last = "model-last.safetensors" if names else "model.safetensors"
    _save(tensors, into / last)
    if names:
        names |= dict.fromkeys(tensors, last)
        _write_json(into / "model.safetensors.index.json", {"weight_map": names})


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its only word for a full disk
        raise OSError(errno.EIO, f"{path.name} could not be written ({error})") from error
    # It comes out readable by its owner alone, which a cache shared by several users is not for.
    path.chmod(path.with_name("config.json").stat().st_mode)


def _floats(kind: Kind, blocks: Bytes, weight: _Weight) -> torch.Tensor:
    """Numbers in the narrowest type that says the same; bfloat16 of quantised ones."""
    import torch

    exact = torch.from_numpy(np.array(kind.dequantise(blocks))) - weight.added
    exact = (-exact).log() if weight.is_log else exact
    rounded = exact.bfloat16()
    if kind.unpack is not None or torch.equal(rounded.float(), exact):
        return rounded
    return exact.half() if kind.name == "F16" else exact


def _write_blocks(weights: Sequence[_Found], into: Path) -> None:
    """Keep the integers themselves, where the kernels have such blocks."""
    from foredraft.models.native.source_blocks import FILE, save_blocks

    found = ((weight, _blocks(tensor.kind, rows)) for tensor, weight, rows in _rows(weights))
    kept = {weight.name: blocks for weight, blocks in found if blocks is not None}
    if kept:
        save_blocks(into, kept)
        (into / FILE).chmod((into / "config.json").stat().st_mode)


def _blocks(kind: Kind, blocks: Bytes) -> Blocks | None:
    """A matrix of 32 weights a scale, as the kernels have it; None: another format."""
    from foredraft.models.native.quant import INT4, INT8
    from foredraft.models.native.weights import unpacked

    forms = {"Q4_0": INT4, "Q4_1": INT4, "Q8_0": INT8}
    if kind.name not in forms or blocks.ndim != 3:
        return None
    # Blocks that do not give the weights are not used.
    return unpacked(kind, blocks, forms[kind.name])


def _rows(weights: Sequence[_Found]) -> Iterator[tuple[GgufTensor, _Weight, Bytes]]:
    """The blocks of each tensor, its rows in transformers' order."""
    for file, tensor, weight in weights:
        blocks = file.blocks(tensor)
        yield tensor, weight, half_split_rows(blocks, weight.heads) if weight.heads else blocks
