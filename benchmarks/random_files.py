"""Model files of well-known shapes with random weights: for loading, and for nothing else.

Some rows are drawn once and written again and again, so a file is there at the disk's speed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf import quantised, write_settings
from benchmarks.random_model import random_config
from foredraft.load import plan_models
from foredraft.models.native.config import DecoderConfig
from foredraft.options import LoadOptions

_DRAWN_ROWS = 64
_SPREAD = 0.02


@contextmanager
def random_file(load: LoadOptions, shape: str, kind: str) -> Iterator[LoadOptions]:
    """Options for a model of this shape; see `write_random`. Nothing of it is kept behind that."""
    with tempfile.TemporaryDirectory() as folder:
        options = replace(load, model=str(write_random(Path(folder), shape, kind)))
        try:
            yield options
        finally:
            plan, _ = plan_models(options)
            if plan.kept.folder:
                shutil.rmtree(plan.kept.folder.parent, ignore_errors=True)
            shutil.rmtree(plan.directory)  # of a GGUF file: what was prepared of it


def write_random(folder: Path, shape: str, kind: str) -> Path:
    """A model of this shape; what `LoadOptions.model` names.

    Args:
        kind: "safetensors" (in bfloat16), or a quantisation of `benchmarks.gguf`.
    """
    config = random_config(shape)
    if kind == "safetensors":
        return _write_safetensors(folder, config)
    return _write_gguf(folder / f"{shape}-{kind}.gguf", config, kind)


def _raw(config: DecoderConfig) -> dict[str, Any]:
    names = (
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings"),
    )
    return {name: getattr(config, name) for name in names}


def _shapes(config: DecoderConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Of each tensor of a model of the family llama: its names here and in GGUF, and its shape."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    yield "model.embed_tokens", "token_embd", (vocab, hidden)
    if not config.tie_word_embeddings:
        yield "lm_head", "output", (vocab, hidden)
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        yield f"{ours}.input_layernorm", f"{theirs}.attn_norm", (hidden,)
        yield f"{ours}.self_attn.q_proj", f"{theirs}.attn_q", (query, hidden)
        yield f"{ours}.self_attn.k_proj", f"{theirs}.attn_k", (key_value, hidden)
        yield f"{ours}.self_attn.v_proj", f"{theirs}.attn_v", (key_value, hidden)
        yield f"{ours}.self_attn.o_proj", f"{theirs}.attn_output", (hidden, query)
        yield f"{ours}.post_attention_layernorm", f"{theirs}.ffn_norm", (hidden,)
        yield f"{ours}.mlp.gate_proj", f"{theirs}.ffn_gate", (inner, hidden)
        yield f"{ours}.mlp.up_proj", f"{theirs}.ffn_up", (inner, hidden)
        yield f"{ours}.mlp.down_proj", f"{theirs}.ffn_down", (hidden, inner)
    yield "model.norm", "output_norm", (hidden,)


def _drawn(num_inputs: int) -> Any:
    draw = np.random.default_rng(num_inputs)
    rows = draw.standard_normal((_DRAWN_ROWS, num_inputs), dtype=np.float32)
    return rows * np.float32(_SPREAD)


def _tiled(rows: Any, count: int) -> Any:
    return np.tile(rows, (-(-count // len(rows)), 1))[:count]


def _write_safetensors(folder: Path, config: DecoderConfig) -> Path:
    """One file for each tensor, and the index of them: no more than a tensor is in memory."""
    import torch
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(_raw(config)))
    files: dict[str, str] = {}
    for number, (name, _, shape) in enumerate(_shapes(config)):
        if len(shape) == 1:
            tensor = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensor = torch.from_numpy(_drawn(shape[1])).bfloat16()
            tensor = tensor.repeat(-(-shape[0] // _DRAWN_ROWS), 1)[: shape[0]].contiguous()
        files[f"{name}.weight"] = f"model-{number:05}.safetensors"
        save_file({f"{name}.weight": tensor}, folder / files[f"{name}.weight"])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    return folder


def _write_gguf(path: Path, config: DecoderConfig, kind: str) -> Path:
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    write_settings(writer, config, _raw(config))
    _write_made_up_vocabulary(writer, config.vocab_size)
    matrix_kind = gguf.GGMLQuantizationType[kind.upper()]
    stored = {
        shape: (quantised(_drawn(shape[1]), matrix_kind), matrix_kind)
        if len(shape) > 1
        else (np.ones((1, *shape), np.float32), gguf.GGMLQuantizationType.F32)
        for _, _, shape in _shapes(config)
    }
    for _, name, shape in _shapes(config):
        rows, of = stored[shape]
        whole = (*shape[:-1], rows.shape[-1])
        num_bytes = int(np.prod(whole)) * rows.itemsize
        writer.add_tensor_info(f"{name}.weight", whole, rows.dtype, num_bytes, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, shape in _shapes(config):
        rows, _ = stored[shape]
        writer.write_tensor_data(_tiled(rows, shape[0]) if len(shape) > 1 else rows[0])
    writer.close()
    return path


def _write_made_up_vocabulary(writer: Any, count: int) -> None:
    import gguf

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, "ab", *(f"<{number}>" for number in range(count - len(letters) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges(["a b"])
