"""LoRA adapters (arXiv 2106.09685) as PEFT saves them: merged into the weights as they are read.

A folder of an adapter names its base model. Its directory in the cache has links to the files of
both; the product of an adapter's two matrices is added where a matrix is read. Other features
are refused by name.

Shape legend: R rows, K inputs, N rank of the adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.json_files import read_json
from foredraft.models.files.manifest import MANIFEST_NAME
from foredraft.models.files.tensors import FLOATS, LoraPlace, StoredTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF_THE_ADAPTER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")
PREFIX = "base_model.model."
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "megatron_config"), False),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "layer_replication"), None),
    "bias": "none",
    "use_qalora": False,
    "target_parameters": None,
}
"""Fields of features that are not merged, and the value that leaves each out."""


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter and no model."""
    return (directory / CONFIG).is_file() and not (directory / "config.json").exists()


def base_of(directory: Path) -> str:
    """The name of an adapter's model.

    Raises:
        ModelLoadError: the adapter names none, is no LoRA, or has something that is not merged.
    """
    path, config = directory / CONFIG, read_json(directory / CONFIG)
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelLoadError(f"{path}: adapters of the kind {kind!r:.40} are not merged, only LORA")
    for field, neutral in _NEUTRAL.items():
        if (value := config.get(field)) not in (neutral, None, [], {}):
            raise ModelLoadError(
                f"{path}: {field} {value!r:.80} is not merged; merge the adapter with "
                "PEFT's merge_and_unload() and save the model"
            )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelLoadError(f"{path} names no base_model_name_or_path; write it there")
    return base


def link_both(adapter: Path, base: Path, into: Path) -> None:
    """Fill a directory with links to the files of both; the adapter's tokenizer counts."""
    own = [path for pattern in _OF_THE_ADAPTER for path in adapter.glob(pattern)]
    own += [adapter / CONFIG, adapter / WEIGHTS]
    theirs = (path for path in base.iterdir() if path.is_file() and path.name != MANIFEST_NAME)
    for path in [*theirs, *own]:
        link = into / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())


def with_adapter(
    directory: Path, tensors: Mapping[str, StoredTensor], own: Mapping[str, StoredTensor]
) -> Mapping[str, StoredTensor]:
    """The tensors of a model, to which those of its adapter are added as they are read.

    Args:
        directory: of both.
        own: the adapter's tensors, by their names in its file.

    Raises:
        ModelLoadError: a matrix of the adapter fits none of the model.
    """
    config, merged = read_json(directory / CONFIG), dict(tensors)
    for name in own:
        stem, found, _ = name.removeprefix(PREFIX).partition(".lora_A.")
        if not found:
            if ".lora_B." in name:
                continue
            raise ModelLoadError(f"{directory / WEIGHTS}: {name} is not merged, only LoRA matrices")
        other = name.replace(".lora_A.", ".lora_B.")
        first, second = own[name], own.get(other)
        target = merged.get(f"{stem}.weight")
        if second is None or target is None or not _fit(first, second, target):
            shapes = target.shape if target else "no such matrix"
            raise ModelLoadError(
                f"{directory / WEIGHTS}: {name} of shape {first.shape} fits no matrix of the base "
                f"model ({stem}: {shapes}); the adapter belongs to another model"
            )
        first = replace(first, name=first.name or name)
        second = replace(second, name=second.name or other)
        place = LoraPlace(first, second, _scale(config, stem, first.shape[0]))
        merged[f"{stem}.weight"] = replace(target, lora=place)
    return merged


def _fit(first: StoredTensor, second: StoredTensor, target: StoredTensor) -> bool:
    are_floats = first.dtype in FLOATS and second.dtype in FLOATS
    if not (are_floats and len(first.shape) == len(second.shape) == 2):
        return False
    (rank, inputs), (rows, same) = first.shape, second.shape
    return rank == same and (rows, inputs) == target.shape


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of a module's product."""
    patterns = config.get("alpha_pattern") or {}
    own = [alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
    alpha = float((own or [config.get("lora_alpha", 8)])[0])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
