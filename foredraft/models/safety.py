"""What is looked at before anything of a checkpoint is loaded.

Only files that cannot run code are ever opened: JSON and safetensors. The names a checkpoint
gives for its own files are not trusted, and a damaged file is found here rather than as a crash
or as wrong numbers later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from foredraft.core.errors import ModelLoadError
from foredraft.models.json_files import read_json

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_INDEX = "model.safetensors.index.json"
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
# Bits, because some types of the format are narrower than a byte.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def check_checkpoint_dir(directory: Path) -> None:
    """See that ``directory`` holds a checkpoint that can be read safely and completely.

    Reads ``config.json``, the index and the headers of the weight files, never the weights.

    Raises:
        ModelLoadError: there is no readable ``config.json``; it names code to be run; the weights
            are missing, incomplete, damaged, or in a format that is never read (pickle, GGUF).
    """
    if not directory.is_dir():
        raise ModelLoadError(f"no such directory: {directory}")
    _check_config(directory)
    for path in _weight_files(directory):
        check_safetensors(path)


def _check_config(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"{directory} has no config.json{_what_else_is_there(directory)}; a model is a "
            "directory with config.json, tokenizer.json and *.safetensors"
        )
    config = read_json(directory / "config.json")
    tokenizer_config = directory / "tokenizer_config.json"
    configs = {"config.json": config}
    if tokenizer_config.is_file():
        configs["tokenizer_config.json"] = read_json(tokenizer_config)
    for name, content in configs.items():
        if "auto_map" in content:
            raise ModelLoadError(
                f"{directory / name} has an auto_map: the model wants Python code of its own to be "
                f"run ({content['auto_map']}). foredraft never runs code from a checkpoint. Use a "
                "model whose architecture is part of transformers"
            )


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        return _indexed_files(directory, index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(_no_weights(directory))
    return files


def _indexed_files(directory: Path, index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map; get the whole checkpoint again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # Compared as text: files of the hub's cache are links that rightly lead elsewhere.
        if name != Path(name).name or not name.endswith(".safetensors") or "\\" in name:
            raise ModelLoadError(
                f"{index} names {name!r}, which is not a safetensors file of its own directory; "
                "it was refused"
            )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelLoadError(
            f"{directory} lacks {len(missing)} of the {len(names)} weight files that {_INDEX} "
            f"names: {shown}. Download the checkpoint again"
        )
    return [directory / name for name in names]


def _no_weights(directory: Path) -> str:
    pickles = _names(directory, *_PICKLES)
    if pickles:
        return (
            f"{directory} is pickle-only ({pickles}): a pickle can run code when it is read, so it "
            "is never opened. Get the model as safetensors, or convert it where you trust it with "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    return (
        f"{directory} has no weights (*.safetensors){_what_else_is_there(directory)}; get the "
        "whole checkpoint"
    )


def _what_else_is_there(directory: Path) -> str:
    ggufs = _names(directory, "*.gguf")
    if not ggufs:
        return ""
    return f"; {ggufs} is not read: a foreign GGUF file is never parsed, get the safetensors model"


def _names(directory: Path, *patterns: str) -> str:
    found = sorted({path.name for pattern in patterns for path in directory.glob(pattern)})
    return ", ".join(found[:3]) + (", …" if len(found) > 3 else "")


# ---------------------------------------------------------------------------------- safetensors


def check_safetensors(path: Path) -> None:
    """See that a safetensors file is whole: its header describes exactly the bytes that follow.

    Raises:
        ModelLoadError: it is truncated, longer than it says, or its header is damaged.
    """
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            data_start = _HEADER_LENGTH_BYTES + header_bytes
            if data_start > num_bytes or not 2 <= header_bytes <= _MAX_HEADER_BYTES:
                raise _damaged(path, f"it has {num_bytes} bytes and a header of {header_bytes}")
            header = json.loads(file.read(header_bytes))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    end = _check_spans(path, {k: v for k, v in header.items() if k != "__metadata__"})
    if data_start + end != num_bytes:
        raise _damaged(path, f"it has {num_bytes} bytes and should have {data_start + end}")


def _check_spans(path: Path, tensors: Mapping[str, Any]) -> int:
    """The end of the last tensor, when the tensors lie one behind the other without a gap."""
    spans = sorted((_span(path, name, entry), name) for name, entry in tensors.items())
    end = 0
    for (start, stop), name in spans:
        if start != end:
            raise _damaged(path, f"tensor {name!r} starts at byte {start} and not at {end}")
        end = stop
    return end


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        (start, stop), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"tensor {name!r} is not described") from error
    counts = [start, stop, *shape] if isinstance(shape, list) else [None]
    if any(type(count) is not int or count < 0 for count in counts):
        raise _damaged(path, f"tensor {name!r} has offsets {[start, stop]} and shape {shape}")
    # A type that is not known here is left to the reader, which refuses what it cannot read.
    if str(dtype) in _BITS and (stop - start) * 8 != prod(shape) * _BITS[str(dtype)]:
        raise _damaged(
            path, f"tensor {name!r} of shape {shape} and type {dtype} has {stop - start} bytes"
        )
    return start, stop


def _damaged(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is truncated or damaged: {what}. Download it again")
