"""An encoder-decoder from a package: flan-t5-small, fine-tuned to write titles.

The package ``traceforge-title-model`` (MIT; FLAN-T5 itself Apache-2.0) carries encoder and decoder
as ONNX files with 8-bit weights. ``python -m benchmarks.flan_t5 FOLDER`` fetches it (68 MB), checks
it by hash and writes a folder that foredraft loads; the numbers are dequantised to float32 without
any loss.

An ONNX file is a protobuf message: fields, each a number and a value. Only the graph's initialisers
and nodes are read.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.manifest import sha256_of
from foredraft.models.files.packages import Package, obtain

Array: TypeAlias = npt.NDArray[Any]

_TYPES: dict[int, Any] = {1: np.dtype("<f4"), 2: np.dtype(np.uint8), 3: np.dtype(np.int8)}
"""Types of tensors, by ONNX's numbers; others are not read."""
_GRAPH, _NODE, _TENSOR = 7, 1, 5  # fields of a model, and of its graph
_FIXED_BYTES = {1: 8, 5: 4}  # sizes of values, by their wire type
_MAX_VARINT = 10

NAME = "flan-t5-small-titles"
_ENCODER = "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787"
_DECODER = "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc"
_TOKENIZER = "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6"
_FILES = {
    "encoder.onnx": (35_628_332, _ENCODER),
    "decoder.onnx": (58_627_575, _DECODER),
    "tokenizer.json": (2_422_486, _TOKENIZER),
}

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


@dataclass(frozen=True)
class OnnxFile:
    """The graph of a file.

    Attributes:
        tensors: float32, uint8 and int8 initialisers by name.
        inputs: names of each node's inputs, by the node's name.
    """

    tensors: Mapping[str, Array]
    inputs: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, path: Path) -> OnnxFile:
        """Read a file.

        Raises:
            ModelLoadError: it is damaged.
        """
        try:
            content = memoryview(path.read_bytes())
            (graph,) = (value for field, value in _fields(content) if field == _GRAPH)
            parts = [*_fields(graph)]
            found = (_tensor(value) for field, value in parts if field == _TENSOR)
            tensors = dict(tensor for tensor in found if tensor is not None)
            inputs = dict(_node(value) for field, value in parts if field == _NODE)
        except (ValueError, IndexError, TypeError, OSError) as error:
            raise ModelLoadError(f"{path} cannot be read as ONNX: {error}") from error
        return cls(tensors, inputs)

    def dequantised(self, name: str) -> Array:
        """A float32 tensor, or one of 8 bits with the scale and zero point of all its numbers.

        Raises:
            ModelLoadError: the file does not hold it.
        """
        if name in self.tensors:
            return self.tensors[name]
        try:
            quantised, scale, zero = (
                self.tensors[f"{name}_{part}"] for part in ("quantized", "scale", "zero_point")
            )
        except KeyError as error:
            raise ModelLoadError(f"the ONNX file does not hold {error}") from error
        whole = quantised.astype(np.float32) - np.float32(zero.item())
        whole *= np.float32(scale.item())
        return whole


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers, or the bytes of texts, arrays and messages.

    Raises:
        ValueError, TypeError: it is none.
    """
    place, end = 0, len(message)
    while place < end:
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield tag >> 3, value
            continue
        size = _FIXED_BYTES.get(kind)
        if kind == 2:
            size, place = _varint(message, place)
        if size is None or place + size > end:
            raise ValueError(f"a field of type {kind} at byte {place} of {end}")
        yield tag >> 3, message[place : place + size]
        place += size


def _varint(message: Any, place: int) -> tuple[int, int]:
    """A number in groups of seven bits, and where it ends."""
    number = 0
    for group in range(_MAX_VARINT):
        byte = message[place + group]
        number |= (byte & 0x7F) << (7 * group)
        if byte < 0x80:
            return number, place + group + 1
    raise ValueError(f"a number without end at byte {place}")


def _tensor(message: Any) -> tuple[str, Array] | None:
    """Name and numbers; None for a type that is not read. Small ones are stored field by field."""
    shape, name, kind = list[int](), "", 0
    raw: Any = b""
    numbers: list[int] = []
    for field, value in _fields(message):
        if field == 1:
            shape += [value] if isinstance(value, int) else _numbers(value)
        elif field == 2:
            kind = value
        elif field in (4, 9):  # float32, or any in its bytes
            raw = value
        elif field == 5:
            numbers += [value] if isinstance(value, int) else _numbers(value)
        elif field == 8:
            name = bytes(value).decode()
    if kind not in _TYPES:
        return None
    if numbers:
        # Negative ones are written in 64 bits.
        signed = [number - (1 << 64) if number >> 63 else number for number in numbers]
        return name, np.array(signed).astype(_TYPES[kind]).reshape(shape)
    return name, np.frombuffer(raw, _TYPES[kind]).reshape(shape)


def _numbers(message: Any) -> list[int]:
    found, place = [], 0
    while place < len(message):
        number, place = _varint(message, place)
        found.append(number)
    return found


def _node(message: Any) -> tuple[str, tuple[str, ...]]:
    inputs, name = list[str](), ""
    for field, value in _fields(message):
        if field == 1:
            inputs.append(bytes(value).decode())
        elif field == 3:
            name = bytes(value).decode()
    return name, tuple(inputs)


def _obtained(name: str, scratch: Path) -> Path:
    """A file of the package."""
    num_bytes, sha256 = _FILES[name]
    path = f"traceforge_title_model/data/span/{name}"
    package = Package("traceforge-title-model==0.2.0", path, num_bytes)
    found = obtain(package, scratch, lambda num_bytes: None)
    if sha256_of(found) != sha256:
        raise ModelLoadError(f"{package.requirement} does not hold the known {name}")
    return found


def write_model(into: Path) -> Path:
    """Fetch the package, and write config, tokenizer and safetensors into a directory.

    Raises:
        ModelLoadError: the package cannot be downloaded, or an ONNX file is damaged.
    """
    from safetensors.numpy import save_file

    into.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        encoder, decoder, tokenizer = (_obtained(name, Path(scratch) / name) for name in _FILES)
        weights = dict(_weights(OnnxFile.read(encoder))) | dict(_weights(OnnxFile.read(decoder)))
        save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(tokenizer, into / "tokenizer.json")
    for name, content in (
        ("config.json", _CONFIG),
        ("generation_config.json", _TOKENS),
        ("tokenizer_config.json", {"eos_token": "</s>", "pad_token": "<pad>"}),
    ):
        (into / name).write_text(json.dumps(content, indent=2) + "\n")
    return into


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


if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    write_model(Path(folder))
