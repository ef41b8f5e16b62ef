"""GGUF files for tests, written by hand: whatever a field should say, it says."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.models.files.gguf_blocks import KINDS
from tests.models.checkpoints import CHAT_TEMPLATE, train_tokenizer

_LAYOUTS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_LAYOUTS[12] = "d"
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Typed:
    """A value of metadata with the number of its type.

    Attributes:
        item: of an array the type of what it holds.
        count: of an array how many it claims to hold; None: as many as it does.
    """

    kind: int
    value: Any
    item: int = 0
    count: int | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor; ``dimensions`` innermost first, as files have them.

    Attributes:
        offset: None: behind the tensor before it.
    """

    kind: int
    dimensions: Sequence[int]
    content: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def typed(value: Any) -> Typed:
    """A value with the type that files usually have for it."""
    match value:
        case Typed():
            return value
        case bool():
            return Typed(7, value)
        case int():
            return Typed(4, value)
        case float():
            return Typed(6, value)
        case str():
            return Typed(STRING, value)
        case [str(), *_]:
            return Typed(ARRAY, value, STRING)
        case _:
            return Typed(ARRAY, value, 5)


def _value(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(f"<{_LAYOUTS[kind]}", value)


def entry(key: str, value: Any) -> bytes:
    """One entry of the metadata."""
    found = typed(value)
    head = text(key) + struct.pack("<I", found.kind)
    if found.kind != ARRAY:
        return head + _value(found.kind, found.value)
    count = len(found.value) if found.count is None else found.count
    items = b"".join(_value(found.item, item) for item in found.value)
    return head + struct.pack("<IQ", found.item, count) + items


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, Stored]] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    """A whole file. The counts are what it claims; None: what is so."""
    infos, data = b"", b""
    for name, tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        infos += text(name) + struct.pack("<I", len(tensor.dimensions))
        infos += struct.pack(f"<{len(tensor.dimensions)}Q", *tensor.dimensions)
        infos += struct.pack("<IQ", tensor.kind, offset)
        data += tensor.content
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(metadata) if num_entries is None else num_entries,
    )
    header = magic + struct.pack("<IQQ", version, *counts)
    header += b"".join(entry(key, value) for key, value in metadata.items()) + infos
    return header + bytes(-len(header) % alignment) + data


def write_gguf(path: Path, *args: Any, **options: Any) -> Path:
    """See `gguf_bytes`."""
    path.write_bytes(gguf_bytes(*args, **options))
    return path


# ------------------------------------------------------------------------------ a tiny Llama

CODES = {kind.name: code for code, kind in KINDS.items()}
HEADS, KV_HEADS = 4, 2
CONTROL = 3


def shape_of(**more: Any) -> LlamaConfig:
    """Rows of 256 weights, which every format can hold."""
    sizes = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 256}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 2}
    limits = {"max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}}
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2}
    return LlamaConfig(**(sizes | heads | limits | rope | ids | more))


def metadata_of(config: LlamaConfig, **more: Any) -> dict[str, Any]:
    """What a file says of such a model; dots in the names of ``more`` are written ``__``."""
    definition = train_tokenizer()
    tokens = [definition.id_to_token(i) for i in range(definition.get_vocab_size())]
    kinds = [CONTROL if token.startswith("<|") else 1 for token in tokens]
    merges = _merges(definition)
    found = {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1234.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return found | {key.replace("__", "."): value for key, value in more.items()}


def _merges(definition: Tokenizer) -> list[str]:
    merges = json.loads(definition.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


SCALES: dict[str, tuple[int, ...]] = {
    "Q6_K": (208,),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Places of a block's scales, where they are not its first one or two numbers."""


def raw_rows(kind: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Stored rows of small weights: random integers, and scales of about a hundredth."""
    found = KINDS[CODES[kind]]
    if found.unpack is None:
        weights = draw.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        return gguf.quantize(weights, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    rows, inputs = shape
    size = (rows, inputs // found.block_weights, found.block_bytes)
    blocks = draw.integers(0, 256, size, np.uint8)
    halves = SCALES.get(kind, (0,) if kind.startswith("IQ") else (0, 2))
    nested = kind.endswith("_K") or kind.startswith("IQ")
    if kind == "MXFP4":
        blocks[..., 0] = draw.integers(115, 122, size[:2])
    for place in halves:
        scale = draw.uniform(0.001, 0.01, size[:2]).astype("<f2") / np.float16(32 if nested else 1)
        blocks[..., place : place + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of queries and keys: row i of the first half, then of the
    second, and so on, within each head."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]


def tensors_of(
    config: LlamaConfig, kind: str, others: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[tuple[str, Stored]], dict[str, torch.Tensor]]:
    """The tensors of a file, and the numbers in them, by their names in transformers.

    Args:
        kind: of matrices.
        others: of those whose names in transformers hold one of these words, another one.
    """
    draw = np.random.default_rng(5)
    model = LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored: list[tuple[str, Stored]] = []
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape, of = tuple(tensor.shape), kind if tensor.ndim == 2 else "F32"
        of = next((other for word, other in others.items() if word in name), of)
        rows = raw_rows(of, shape, draw)
        code = gguf.GGMLQuantizationType[of]
        exact = gguf.dequantize(rows.view(np.float32) if of == "F32" else rows, code)
        values = torch.from_numpy(exact.reshape(shape))
        weights[name] = values
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None
        if heads := {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2]):
            rows = interleave_halves(rows, heads)
        stored.append((target, Stored(CODES[of], shape[::-1], rows.tobytes())))
    return stored, weights


def tiny_llama(folder: Path, kind: str = "F32", **metadata: Any) -> Path:
    """A file of a tiny Llama; ``metadata`` as in `metadata_of`."""
    config = shape_of()
    stored, _ = tensors_of(config, kind)
    return write_gguf(folder / "tiny.gguf", metadata_of(config, **metadata), stored)
