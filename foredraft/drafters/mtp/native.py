"""MTP weights that a checkpoint comes with, where the layers are as a llama layer is.

Several families were trained with such layers, one or one for each depth. Their names differ, and
so do the order in which state and embedding are joined, whether norms are stored less 1, and what
goes on to the next token. Most of the large ones have latent attention or mixtures of experts
there: what does not fit is named and refused, never left out.

Shape legend: V vocabulary, E hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters.common.checkpoints import (
    CheckpointTensors,
    fill,
    final_norm,
    layer_names,
    shape_of,
    under_our_names,
)
from foredraft.drafters.mtp.module import MtpModule
from foredraft.models.base import HeadTarget
from foredraft.models.files.json_files import read_json


@dataclass(frozen=True)
class Layout:
    """How a family names and means its MTP weights.

    Attributes:
        family: for messages.
        prefix: of all names; its group, if it has one, is the module's number.
        layer: of the decoder layer's names, after the prefix.
        embedding_norm, hidden_norm, join, norm: names after the prefix.
        unused: names after the prefix that hold what the target has anyway.
        hidden_first: the state comes before the embedding where they are joined.
        less_one: norms are stored less 1.
        returns: see `MtpModule`.
    """

    family: str
    prefix: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str
    unused: tuple[str, ...] = ()
    hidden_first: bool = False
    less_one: bool = False
    returns: str = "normed"


LAYOUTS = (
    Layout(
        "DeepSeek-V3",
        r"model\.layers\.(\d+)\.",
        "",
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        unused=("embed_tokens.weight", "shared_head.head.weight"),
        returns="plain",
    ),
    Layout(
        "Qwen3-Next",
        r"mtp\.",
        "layers.0.",
        "pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden.weight",
        "fc.weight",
        "norm.weight",
        less_one=True,
    ),
    Layout(
        "MiMo",
        r"model\.mtp_layers\.(\d+)\.",
        "",
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "input_proj.weight",
        "final_layernorm.weight",
        hidden_first=True,
    ),
)

_ADVICE = "Train one: foredraft train mtp"
_COUNT = "num_nextn_predict_layers"


def read_native(directory: Path, target: HeadTarget) -> MtpModule:
    """The MTP heads that a checkpoint comes with.

    Args:
        target: its final norm and head are theirs too.

    Raises:
        ConfigError: there is none, or one that is not as a llama layer.
        ModelLoadError: the checkpoint is damaged, or does not hold as many as its config says.
    """
    path = directory / "config.json"
    config = read_json(path)
    shape = shape_of(config, path)
    weights: dict[str, Tensor] = {}
    with ExitStack() as stack:
        tensors = CheckpointTensors(directory, stack)
        layout, prefixes = _find(tensors.names, directory)
        _check_count(config, prefixes, directory)
        for number, prefix in enumerate(prefixes):
            found = _weights(layout, tensors.below(prefix, layout.unused), directory)
            weights |= {f"heads.{number}.{name}": weight for name, weight in found.items()}
    ids_V = torch.arange(shape.vocab_size)
    parts = target.parts
    norm_E = final_norm(parts, shape.rms_norm_eps)
    weights |= {"target_norm.weight": norm_E, "output": parts.head_rows(ids_V)}
    module = MtpModule(shape, None, layout.returns, len(prefixes))
    fill(module, weights, f"the MTP layer in {directory}")
    return module


def _find(names: Sequence[str], directory: Path) -> tuple[Layout, list[str]]:
    """The layout, and what the names of each head's tensors begin with, by depth."""
    for layout in LAYOUTS:
        pattern = re.compile(f"({layout.prefix}){re.escape(layout.join)}$")
        found = [match for name in names if (match := pattern.match(name))]
        if found:
            found.sort(key=lambda match: int(match[2]) if match.re.groups > 1 else 0)
            return layout, [match[1] for match in found]
    families = ", ".join(layout.family for layout in LAYOUTS)
    raise ConfigError(
        f"{directory} holds no MTP layer under the names of {families}; train one: foredraft train "
        "mtp"
    )


def _check_count(config: Mapping[str, Any], prefixes: Sequence[str], directory: Path) -> None:
    """A head reads what the one before it made: none may be missing."""
    said = config.get(_COUNT)
    if said is not None and said != len(prefixes):
        raise ModelLoadError(
            f"{directory / 'config.json'} says {_COUNT}={said!r:.20}, and the checkpoint holds "
            f"{len(prefixes)} ({', '.join(prefixes)}): copy all of its files"
        )


def _weights(layout: Layout, found: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Under the names of `MtpHead`."""
    names = {
        "embedding_norm.weight": (layout.embedding_norm,),
        "hidden_norm.weight": (layout.hidden_norm,),
        "join.weight": (layout.join,),
        "norm.weight": (layout.norm,),
        **layer_names(layout.layer),
    }
    what = f"the {layout.family} MTP layer in {directory}"
    weights = under_our_names(found, names, what, _ADVICE)
    if layout.less_one:
        weights |= {n: w.float() + 1.0 for n, w in weights.items() if n.endswith("norm.weight")}
    if layout.hidden_first:
        weights["join.weight"] = weights["join.weight"].roll(len(weights["join.weight"]), 1)
    return weights
