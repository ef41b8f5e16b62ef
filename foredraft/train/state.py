"""The state of a training in one file, so that it is whole whenever the process is killed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.files.safety import check_safetensors
from foredraft.system.files import write_tensors

_KEY = "training"


@dataclass
class Counters:
    """How far a training has come.

    Attributes:
        step: batches that were learnt from.
        tokens: without padding.
        seconds: of learning, over all resumptions; evaluating and saving left out.
        epoch: times that all text was seen.
        position: batches of this epoch that were seen.
        order: tells which texts, in which batches, `position` counts.
        survival: running mean of the overlap by depth.
        best: the highest score of a checkpoint.
        evaluated: share of the training at the last evaluation.
        resumed: how often it was taken up again.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    position: int = 0
    order: str = ""
    survival: list[float] = field(default_factory=list)
    best: float = 0.0
    evaluated: float = -1.0
    resumed: int = 0


@dataclass(frozen=True)
class SavedState:
    """What `save_state` wrote."""

    counters: Counters
    recipe: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Tensor]]


def save_state(
    path: Path,
    counters: Counters,
    recipe: Mapping[str, Any],
    groups: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Write a state; the one before is there until this one is.

    Args:
        recipe: what a resumption must have in common with it.
        groups: tensors, such as weights and moments, by group and name.

    Raises:
        TrainingError: it cannot be written, such as on a full disk.
    """
    tensors = {f"{g}/{name}": t for g, part in groups.items() for name, t in part.items()}
    content = {"counters": asdict(counters), "recipe": dict(recipe)}
    write_tensors(path, tensors, {_KEY: json.dumps(content)})


def load_state(path: Path, recipe: Mapping[str, Any]) -> SavedState | None:
    """What `save_state` wrote; None where there is nothing.

    Args:
        recipe: what it must have in common with this one.

    Raises:
        ConfigError: another recipe was trained there.
        ModelLoadError: the file is damaged.
    """
    if not path.is_file():
        return None
    check_safetensors(path)
    groups: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        try:
            content = json.loads((file.metadata() or {})[_KEY])
            counters = Counters(**content["counters"])
            trained: dict[str, Any] = content["recipe"]
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{path} is no state of a training ({error!r:.100})") from error
        _check_recipe(path, trained, recipe)
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = file.get_tensor(name)
    return SavedState(counters, trained, groups)


def _check_recipe(path: Path, trained: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    asked = json.loads(json.dumps(recipe))
    for name, value in asked.items():
        if trained.get(name) != value:
            raise ConfigError(
                f"{path.parent.parent} holds a training with {name} {trained.get(name)!r:.60}, and "
                f"now it is {value!r:.60}; take the same, or another --out"
            )
