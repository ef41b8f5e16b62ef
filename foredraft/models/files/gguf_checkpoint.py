"""A GGUF file as a checkpoint in the hub's own form: config, tokenizer, and where its tensors lie.

The weights stay in the file, or are written as safetensors for whoever reads nothing else. Models
of the family llama are converted. What a file says that is not known here is refused by name: a
model that runs with half of its features gives wrong text.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.gguf import GgufFile, GgufTensor
from foredraft.models.files.gguf_blocks import Bytes, Kind
from foredraft.models.files.gguf_tokenizer import write_tokenizer
from foredraft.models.files.json_files import parse_fields
from foredraft.models.files.safety import GGUF_INDEX
from foredraft.models.files.schema import DecoderFields, GgufFields
from foredraft.models.files.stored import half_split_rows

if TYPE_CHECKING:
    import torch

    from foredraft.models.files.progress import Progress
    from foredraft.models.native.packed import Blocks

RECIPE = "GGUF converter 2"
"""Raise it when a conversion makes something else: older copies are converted again."""
_MOST_BYTES = 2 << 30
"""Of one file of weights, and so of what a conversion holds in memory."""
_FAMILY = "llama"
_KNOWN = GgufFields.keys() | {"llama.vocab_size", "llama.rope.scaling.finetuned"}
"""Keys of the family that are read, or say nothing about how it computes."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MOST_PARTS = 1000

_ROTARY_FACTORS = "rope_freqs.weight"
"""By what each frequency of rotary embedding is divided."""
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class _Weight:
    """A tensor of the file under its name in transformers.

    Attributes:
        heads: of queries and keys, whose rows llama.cpp orders in its own way; 0: others.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0


_Found = tuple[GgufFile, GgufTensor, _Weight]
"""A tensor of the model: the file it is in, where it lies there, and what it is."""


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
    first = files[0]
    fields = _checked_fields(first)
    tensors = _all_tensors(files)
    config = _config(first, fields, tensors)
    weights = _weights(first, tensors, config)
    _write_json(into / "config.json", config)
    special = {key: index for key, index in fields.special_ids().items() if key in config}
    ends = {"eos_token_id": fields.end_ids()} if len(fields.end_ids()) > 1 else {}
    _write_json(into / "generation_config.json", special | ends)
    write_tokenizer(first.path, fields, into)
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
    """About what `write_checkpoint` writes, rather more than less.

    Raises:
        ModelLoadError: the file is damaged.
    """
    tensors = [tensor for part in parts_of(gguf) for tensor in GgufFile(part).tensors.values()]
    return sum(2 * prod(tensor.shape) + tensor.num_bytes for tensor in tensors)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------- config


def _checked_fields(file: GgufFile) -> GgufFields:
    """What the file says of its model, when all of it is known."""
    family = file.metadata.get("general.architecture")
    if family != _FAMILY:
        _refuse(file, f"models of the family {family!r:.80} are not read from GGUF files yet")
    unknown = {key for key in file.metadata if key.startswith(f"{_FAMILY}.")} - _KNOWN
    if unknown:
        _refuse(file, f"what {min(unknown)!r:.80} asks for is not implemented for GGUF files")
    return parse_fields(file.path, file.metadata, GgufFields)


def _refuse(file: GgufFile, what: str) -> NoReturn:
    raise ModelLoadError(f"{file.path}: {what}; or get the model as safetensors")


def _config(
    file: GgufFile, fields: GgufFields, tensors: Mapping[str, tuple[GgufFile, GgufTensor]]
) -> dict[str, Any]:
    """``config.json`` in the hub's own spelling, which transformers and foredraft both read."""
    head_dim = fields.key_length or fields.embedding_length // fields.head_count
    if {fields.value_length or head_dim, fields.rope_dimension_count or head_dim} != {head_dim}:
        _refuse(file, "heads whose keys, values and rotated parts differ in size are not read")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields.tokens),
        "hidden_size": fields.embedding_length,
        "intermediate_size": fields.feed_forward_length,
        "num_hidden_layers": fields.block_count,
        "num_attention_heads": fields.head_count,
        "num_key_value_heads": fields.head_count_kv or fields.head_count,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.context_length,
        "rms_norm_eps": _shortest(fields.rms_norm_eps),
        "rope_theta": fields.rope_theta,
        "rope_scaling": _scaling(file, fields, head_dim, tensors.get(_ROTARY_FACTORS)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        **{key: id for key, id in fields.special_ids().items() if key != "unk_token_id"},
        "torch_dtype": "bfloat16",
    }
    parse_fields(file.path, config, DecoderFields)  # sizes that do not fit together
    return config


def _shortest(number: float) -> float:
    """GGUF holds the float32 nearest to 1e-05; six digits bring the number itself back."""
    return float(f"{number:.6g}")


def _scaling(
    file: GgufFile, fields: GgufFields, head_dim: int, stored: tuple[GgufFile, GgufTensor] | None
) -> dict[str, Any] | None:
    """Rotary scaling. Files of Llama 3 hold its factors and not what they are computed from."""
    linear = fields.scaling_type == "linear"
    if stored is None:
        return {"rope_type": "linear", "factor": fields.scaling_factor} if linear else None
    part, tensor = stored
    if not linear and tensor.shape == (head_dim // 2,):
        found = part.weights(tensor)
        factor = _shortest(found.max())
        if np.allclose(found, _llama3_factors(factor, fields.rope_theta, head_dim), rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA_3}
    _refuse(file, f"the factors of its rotary embedding ({_ROTARY_FACTORS}) are not Llama 3's")


def _llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray[Any, Any]:
    """Slow frequencies are divided by ``factor``, fast ones by 1, those between by between."""
    low, high, context = _LLAMA_3.values()
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = context * frequencies / (2 * np.pi)
    is_fast = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / (is_fast + (1 - is_fast) / factor)


# ---------------------------------------------------------------------------------------- weights


def _weights(
    file: GgufFile,
    tensors: Mapping[str, tuple[GgufFile, GgufTensor]],
    config: dict[str, Any],
) -> list[_Found]:
    """The tensors of the model, which the files hold and no others."""
    if config["num_hidden_layers"] > len(tensors):
        _refuse(file, f"it has {len(tensors)} tensors, too few for its number of layers")
    expected = _layout(config)
    if missing := sorted(expected.keys() - tensors):
        _refuse(file, f"tensor {missing[0]!r} is missing; get the whole file again")
    if unknown := sorted(tensors.keys() - expected - {_ROTARY_FACTORS}):
        _refuse(file, f"tensor {unknown[0]!r:.80} belongs to a feature that is not implemented")
    for name, weight in expected.items():
        if (shape := tensors[name][1].shape) != weight.shape:
            _refuse(file, f"tensor {name!r} has shape {shape}, not {weight.shape}")
    return [(*tensors[name], expected[name]) for name in tensors if name in expected]


def _layout(config: dict[str, Any]) -> dict[str, _Weight]:
    """All tensors of a model of this config, by their names in GGUF."""
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key_value = heads * config["head_dim"], kv_heads * config["head_dim"]
    shapes = {
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (key_value, hidden),
        "attn_v": (key_value, hidden),
        "attn_output": (hidden, query),
        "ffn_down": (hidden, inner),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
    }
    reordered = {"attn_q": heads, "attn_k": kv_heads}
    top = {
        name: _Weight(ours, (hidden,) if name == "output_norm.weight" else (vocab, hidden))
        for name, ours in _TOP_NAMES.items()
    }
    if config["tie_word_embeddings"]:
        del top["output.weight"]
    return top | {
        f"blk.{layer}.{part}.weight": _Weight(
            f"model.layers.{layer}.{ours}.weight", shapes[part], reordered.get(part, 0)
        )
        for layer in range(config["num_hidden_layers"])
        for part, ours in _LAYER_NAMES.items()
    }


def _write_weights(weights: Sequence[_Found], into: Path, progress: Progress) -> None:
    """Into one file, or into several that fit into memory and an index of them."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    num_bytes = 0
    for done, (tensor, weight, blocks) in enumerate(_rows(weights), start=1):
        floats = _floats(tensor.kind, blocks).reshape(tensor.shape)
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


def _floats(kind: Kind, blocks: Bytes) -> torch.Tensor:
    """Numbers in the narrowest type that says the same; bfloat16 of quantised ones."""
    import torch

    exact = torch.from_numpy(np.array(kind.dequantise(blocks)))
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
    from foredraft.models.native.as_stored import unpacked

    if kind.name not in ("Q4_0", "Q4_1", "Q8_0") or blocks.ndim != 3:
        return None
    return unpacked(kind, blocks)  # blocks that do not give the weights are not used


def _rows(weights: Sequence[_Found]) -> Iterator[tuple[GgufTensor, _Weight, Bytes]]:
    """The blocks of each tensor, its rows in transformers' order."""
    for file, tensor, weight in weights:
        blocks = file.blocks(tensor)
        yield tensor, weight, half_split_rows(blocks, weight.heads) if weight.heads else blocks
