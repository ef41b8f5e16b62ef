"""SmolLM2's GGUF file as a checkpoint in the hub's own form: config, tokenizer, bf16 safetensors.

To be handed the one file that `foredraft.models.files.smollm2` knows, and no other.

The tensors are read with ``gguf``, not through ``from_pretrained(..., gguf_file=...)``, which wants
``accelerate`` and refuses to save what it has loaded so. The weights are the same bits.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.models.files.progress import Progress
    from foredraft.models.native.packed import Blocks


def write_checkpoint(gguf: Path, into: Path, progress: Progress) -> None:
    """Write all files of a checkpoint into the directory ``into``."""
    from gguf import GGUFReader

    progress.stage("converting the weights to bf16 safetensors")
    reader = GGUFReader(str(gguf))
    config = _config(reader)
    _write_json(into / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(into / "generation_config.json", special)
    _write_weights(reader, config, into / "model.safetensors", progress)
    _write_blocks(reader, config, into)
    progress.stage("converting the tokenizer")
    _write_tokenizer(reader, into)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: Any) -> dict[str, Any]:
    """``config.json`` in the hub's own spelling, which transformers and foredraft both read."""

    def llama(key: str) -> Any:
        return _field(reader, f"llama.{key}")

    hidden, heads = llama("embedding_length"), llama("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": llama("context_length"),
        # GGUF holds the float32 nearest to 1e-05; six digits bring the number itself back.
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": llama("rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
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


def _write_weights(reader: Any, config: dict[str, Any], path: Path, progress: Progress) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for done, (name, values) in enumerate(_dequantised(reader, config), start=1):
        tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
        progress.advance(done / len(reader.tensors))
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its only word for a full disk
        raise OSError(errno.EIO, f"{path.name} could not be written ({error})") from error
    # It comes out readable by its owner alone, which a cache shared by several users is not for.
    path.chmod(path.with_name("config.json").stat().st_mode)


def _dequantised(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each tensor as float32 under its transformers name."""
    import numpy as np
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _half_split_rows(values, heads[part])
        yield _weight_name(tensor.name), np.array(values)


def _write_blocks(reader: Any, config: dict[str, Any], into: Path) -> None:
    """Keep the integers themselves: Q4_1 has a scale and a minimum for 32 weights, Q8_0 a scale."""
    from foredraft.models.native.source_blocks import FILE, save_blocks

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    blocks = {}
    for tensor in reader.tensors:
        found = _blocks(tensor, heads)
        if found is not None:
            blocks[_weight_name(tensor.name)] = found
    save_blocks(into, blocks)
    (into / FILE).chmod((into / "config.json").stat().st_mode)


def _weight_name(name: str) -> str:
    """Of a tensor in GGUF, as transformers names it."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part, _ = name.split(".")  # blk.<layer>.<part>.weight
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _blocks(tensor: Any, heads: Mapping[str, int]) -> Blocks | None:
    """A quantised tensor's blocks, rows in transformers' order; None if it has none of ours."""
    import numpy as np
    import torch

    from foredraft.models.native.packed import SCALE_INPUTS, Blocks

    kind = tensor.tensor_type.name
    if kind not in ("Q4_1", "Q8_0"):
        return None
    num_scales = 2 if kind == "Q4_1" else 1
    block_bytes = 2 * num_scales + SCALE_INPUTS // num_scales
    rows = np.asarray(tensor.data).reshape(int(tensor.shape[1]), -1)
    part = tensor.name.split(".")[-2]
    if part in heads:
        rows = _half_split_rows(rows, heads[part])
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, block_bytes)
    scales = np.ascontiguousarray(blocks[..., : 2 * num_scales]).view(np.float16)
    integers = blocks[..., 2 * num_scales :].view(np.int8)
    if kind == "Q4_1":  # the lower halves of all bytes, then the upper ones
        unsigned = integers.view(np.uint8)
        integers = np.concatenate((unsigned & 15, unsigned >> 4), axis=-1).view(np.int8)
    found = [torch.from_numpy(scales[..., i].copy()) for i in range(num_scales)]
    return Blocks(torch.from_numpy(integers.copy()), *found)


def _half_split_rows(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of queries and keys.

    It interleaves the two halves that rotary embedding pairs; transformers keeps them apart.
    """
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


_SPECIAL_TYPE = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL


def _write_tokenizer(reader: Any, into: Path) -> None:
    """Rebuild SmolLM2's ``tokenizer.json`` from the vocabulary and merges.

    The pre-tokenizer is not in the file ("smollm" is all it says) and transformers' GGUF route
    assumes GPT-2's, which joins whitespace to what follows it before digits are split: "\\n\\n7"
    became three tokens where the model was trained on two. The original splits digits first.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    # Its own `save` raises bare exceptions when the disk is full.
    (into / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_tokenizer_config(reader, tokens, into)


def _write_tokenizer_config(reader: Any, tokens: list[str], into: Path) -> None:
    def token(kind: str) -> str:
        return tokens[int(_field(reader, f"tokenizer.ggml.{kind}_token_id"))]

    settings = {
        # GPT2Tokenizer would put its own pre-tokenizer in place of the one in tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    _write_json(into / "tokenizer_config.json", settings)
    template = _field(reader, "tokenizer.chat_template")
    (into / "chat_template.jinja").write_text(template, encoding="utf-8")
