"""Validation of a checkpoint before loading.

Only files that cannot run code are ever opened: JSON, safetensors and GGUF. The names a checkpoint
gives for its own files are not trusted, and a damaged file is found here rather than as a crash
or as wrong numbers later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from foredraft.core.errors import ModelLoadError
from foredraft.models.files import lora
from foredraft.models.files.gguf_blocks import BY_NAME
from foredraft.models.files.json_files import read_fields, read_json
from foredraft.models.files.quantised import with_packed
from foredraft.models.files.schema import IndexFields
from foredraft.models.files.tensors import GgufPlace, StoredTensor

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
GGUF_INDEX = "model.gguf.index.json"
"""Says where the tensors lie in GGUF files of the same directory."""
_NEVER_NEEDED = ("rotary_emb.inv_freq", ".cos_cached", ".sin_cached", ".position_ids")
"""Suffixes of tensors that older versions of transformers stored and all versions recompute."""
_LOG = logging.getLogger("foredraft")


class Checkpoint:
    """A directory that was found to hold a checkpoint which can be read safely and completely.

    The constructor does the checks, so an instance is always checked. It reads ``config.json``,
    the index and the headers of the weight files, never the weights.

    Args:
        directory: with ``config.json`` and ``model.safetensors``, or an index and its files.

    Raises:
        ModelLoadError: there is no readable ``config.json``; it names code to be run; the weights
            are missing, incomplete, damaged, or in a format that is never read (pickle).
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ModelLoadError(f"no such directory: {directory}")
        self.directory = directory
        self.config: Mapping[str, Any] = _checked_config(directory)
        self.tensors: Mapping[str, StoredTensor] = with_packed(
            self.config, _stored_tensors(directory)
        )
        parts = _TEXT_PARTS if isinstance(self.config.get("text_config"), dict) else _BACKBONES
        self.tensors = dict(_renamed(parts, *item) for item in self.tensors.items())
        if (directory / lora.CONFIG).is_file() and (directory / lora.WEIGHTS).is_file():
            parts = {lora.PREFIX + part: plain for part, plain in parts.items()}
            own = check_safetensors(directory / lora.WEIGHTS)
            own = dict(_renamed(parts, *item) for item in own.items())
            self.tensors = lora.with_adapter(directory, self.tensors, own)

    @classmethod
    def of(cls, source: Path | Checkpoint) -> Checkpoint:
        """``source`` itself if it was checked already, or the directory, checked now."""
        return source if isinstance(source, Checkpoint) else cls(source)

    @property
    def num_parameters(self) -> int:
        """Parameters of all stored tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Size of all stored tensors, in their files."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def is_gguf(self) -> bool:
        """Whether its tensors lie in GGUF files."""
        return any(tensor.gguf is not None for tensor in self.tensors.values())

    @property
    def weight_files(self) -> list[Path]:
        return sorted({file for tensor in self.tensors.values() for file in tensor.files})

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter is merged into its weights as they are read."""
        return any(tensor.lora is not None for tensor in self.tensors.values())

    @property
    def is_quantised(self) -> bool:
        """Whether some of its weights are integers with scales, as in GGUF files."""
        return any(tensor.is_quantised for tensor in self.tensors.values())

    def warn_of_unused(self, names: Iterable[str]) -> None:
        """Log the tensors that are left out, except those that a model never needs."""
        unused = sorted(name for name in names if not name.endswith(_NEVER_NEEDED))
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            _LOG.warning(
                "%s holds tensors that are not in the model its config.json describes, and they "
                "are left out: %s%s",
                self.directory,
                ", ".join(unused[:3]),
                more,
            )


_TEXT_PARTS = {"model.language_model.": "model.", "language_model.": ""}
_BACKBONES = {"backbone.embeddings.": "model.embed_tokens.", "backbone.": "model."}


def _renamed(parts: Mapping[str, str], name: str, tensor: StoredTensor) -> tuple[str, StoredTensor]:
    """A tensor called as in a model of Llama: of a model of text and images, or of states."""
    for part, plain in parts.items():
        if name.startswith(part):
            return plain + name.removeprefix(part), replace(tensor, name=name)
    return name, tensor


def _checked_config(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"{directory} has no config.json{_what_else_is_there(directory)}; a model is a "
            "directory with config.json, tokenizer.json and *.safetensors"
        )
    config = read_json(directory / "config.json")
    if "auto_map" in config and not _is_known(config.get("model_type")):
        raise ModelLoadError(
            f"{directory / 'config.json'} has an auto_map: the model wants Python code of its own "
            f"to be run ({config['auto_map']}). foredraft never runs code from a checkpoint, and "
            f"this transformers has no model_type {config.get('model_type')!r}. Use another model"
        )
    if "transformers_weights" in config:
        raise ModelLoadError(
            f"{directory / 'config.json'} names its own weight file in transformers_weights "
            f"({config['transformers_weights']!r:.80}); only {_SINGLE}, or the files that {_INDEX} "
            "lists, are read. Rename the file and delete that entry"
        )
    return config


def _is_known(model_type: object) -> bool:
    """Whether transformers has the model itself, whatever code comes with a checkpoint."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the files that are read: transformers takes the same."""
    if (directory / GGUF_INDEX).is_file():
        return _gguf_tensors(directory)
    if (directory / _SINGLE).is_file():
        return check_safetensors(directory / _SINGLE)
    if not (directory / _INDEX).is_file():
        raise ModelLoadError(_no_weights(directory))
    weight_map = read_fields(directory / _INDEX, IndexFields).weight_map
    found: dict[str, StoredTensor] = {}
    for path in _indexed_files(directory, weight_map):
        tensors = check_safetensors(path)
        if twice := sorted(found.keys() & tensors):
            raise ModelLoadError(
                f"{twice[0]} is in {found[twice[0]].file} and again in {path.name}; which one is "
                "meant cannot be known. Get the whole checkpoint again"
            )
        found |= tensors
    for name, file in weight_map.items():
        is_here = name in found and found[name].file.name == file
        if not is_here and not name.endswith(_NEVER_NEEDED):
            raise ModelLoadError(
                f"{directory / _INDEX} says that {name!r:.80} is in {file}, and it is not; get the "
                "whole checkpoint again"
            )
    return found


def _gguf_tensors(directory: Path) -> dict[str, StoredTensor]:
    index, found = directory / GGUF_INDEX, dict[str, StoredTensor]()
    size = cache(lambda path: path.stat().st_size)
    for name, entry in read_json(index).items():
        try:
            file, shape, kind, *place = entry
            path, gguf = _of_directory(index, file, ".gguf"), GgufPlace(BY_NAME[kind], *place)
            _check_shape(gguf, shape)
            found[name] = StoredTensor(path, kind, tuple(shape), gguf)
            is_inside = 0 <= gguf.start <= size(path) - found[name].num_bytes
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(index, f"tensor {name!r:.80} ({error!r:.200})") from error
        if not is_inside:
            raise _damaged(path, f"tensor {name!r:.80} lies beyond its end")
    return found


def _check_shape(gguf: GgufPlace, shape: Sequence[int]) -> None:
    """Refuse rows that are no whole blocks, and heads whose rows are no pairs (ValueError)."""
    counts = [*shape, gguf.heads]
    if (
        any(type(count) is not int or count < 0 for count in counts)
        or shape[-1] % gguf.kind.block_weights
        or (gguf.heads and shape[0] % (2 * gguf.heads))
    ):
        raise ValueError(f"{gguf.kind.name} of shape {shape} and {gguf.heads} heads")


def _of_directory(index: Path, name: Any, suffix: str) -> Path:
    """A file that an index names. Compared as text: files of the hub's cache are links."""
    if name != Path(name).name or not name.endswith(suffix) or "\\" in name:
        raise ModelLoadError(
            f"{index} names {name!r}, which is not a {suffix[1:]} file of its own directory; it "
            "was refused"
        )
    return index.with_name(name)


def _indexed_files(directory: Path, weight_map: Mapping[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    paths = [_of_directory(directory / _INDEX, name, ".safetensors") for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelLoadError(
            f"{directory} lacks {len(missing)} of the {len(names)} weight files that {_INDEX} "
            f"names: {shown}. Download the checkpoint again"
        )
    return paths


def _no_weights(directory: Path) -> str:
    pickles = _names(directory, *_PICKLES)
    if pickles:
        return (
            f"{directory} is pickle-only ({pickles}): a pickle can run code when it is read, so it "
            "is never opened. Get the model as safetensors, or convert it where you trust it with "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    what_else = _what_else_is_there(directory)
    return f"{directory} has neither {_SINGLE} nor {_INDEX}{what_else}; get the whole checkpoint"


def _what_else_is_there(directory: Path) -> str:
    ggufs = _names(directory, "*.gguf")
    return f"; to run a GGUF file, name it as the model ({ggufs})" if ggufs else ""


def _names(directory: Path, *patterns: str) -> str:
    found = sorted({path.name for pattern in patterns for path in directory.glob(pattern)})
    return ", ".join(found[:3]) + (", …" if len(found) > 3 else "")


def check_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file that is whole, by name.

    The library opens a file only if its header describes exactly the bytes that follow.

    Raises:
        ModelLoadError: it is truncated, longer than it says, or its header is damaged.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(path, each.get_dtype(), tuple(each.get_shape()))
                for name, each in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is truncated or damaged: {what}. Download it again")
