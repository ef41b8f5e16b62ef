"""An encoder-decoder from a package: flan-t5-small, fine-tuned to write titles.

The package ``traceforge-title-model`` (MIT; FLAN-T5 itself Apache-2.0) carries encoder and decoder
as ONNX files with 8-bit weights. They are dequantised to float32 without any loss.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foredraft.models.files.onnx import Array, OnnxFile
from foredraft.models.files.packages import KnownFile, Package

if TYPE_CHECKING:
    from foredraft.models.files.progress import Progress

NAME = "flan-t5-small-titles"
_ENCODER = "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787"
_DECODER = "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc"
_TOKENIZER = "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6"
PACKAGE = Package(
    NAME,
    "traceforge-title-model",
    "0.2.0",
    "traceforge_title_model",
    (
        KnownFile("data/span/encoder.onnx", 35_628_332, _ENCODER),
        KnownFile("data/span/decoder.onnx", 58_627_575, _DECODER),
        KnownFile("data/span/tokenizer.json", 2_422_486, _TOKENIZER),
    ),
)
RECIPE = f"converter 1 of {PACKAGE.requirement} {_ENCODER} {_DECODER}"
"""Version of `convert`. Raise it when its output changes: older copies are made again."""

_SIZES = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6}
_NUM_LAYERS, _VOCAB_SIZE = 8, 32128
_TOKENS = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
_CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": _VOCAB_SIZE,
    **_SIZES,
    "num_layers": _NUM_LAYERS,
    "num_decoder_layers": _NUM_LAYERS,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "n_positions": 512,
    **_TOKENS,
}


def convert(files: Sequence[Path], into: Path, progress: Progress) -> None:
    """Write config, tokenizer and safetensors into a directory.

    Args:
        files: of the package, in its order.
        into: the directory.

    Raises:
        ModelLoadError: an ONNX file is damaged.
    """
    from safetensors.numpy import save_file

    encoder, decoder, tokenizer = files
    progress.stage("converting the weights to safetensors")
    weights = dict(_weights(OnnxFile.read(encoder)))
    progress.advance(0.3)
    weights |= _weights(OnnxFile.read(decoder))
    progress.advance(0.6)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(tokenizer, into / "tokenizer.json")
    for name, content in (
        ("config.json", _CONFIG),
        ("generation_config.json", _TOKENS),
        ("tokenizer_config.json", {"eos_token": "</s>", "pad_token": "<pad>"}),
    ):
        (into / name).write_text(json.dumps(content, indent=2) + "\n")


def _weights(file: OnnxFile) -> Iterator[tuple[str, Array]]:
    """Weights by their names in transformers.

    Norms and embeddings have these names; a matrix is named by the operation that multiplies with
    it, from the other side. Both files hold the same embedding.
    """
    for name in file.tensors:
        stem = name.removesuffix("_quantized")
        if name.endswith(("norm.weight", "bias.weight_quantized", "shared.weight_quantized")):
            yield _renamed(stem), file.dequantised(stem)
    for node, inputs in file.inputs.items():
        if node.endswith("/MatMul_quant"):
            name = node.removesuffix("/MatMul_quant").strip("/").replace("/", ".")
            weight_KR = file.dequantised(inputs[1].removesuffix("_quantized"))
            yield _renamed(f"{name}.weight"), np.ascontiguousarray(weight_KR.T)


def _renamed(name: str) -> str:
    return "encoder." + name[4:] if name.startswith("enc.") else name.removeprefix("m.")
