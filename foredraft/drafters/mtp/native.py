"""MTP weights that a checkpoint comes with, where the layer is as a llama layer is.

Several families were trained with such a layer. Their names differ, and so do the order in which
state and embedding are joined, whether norms are stored less 1, and what goes on to the next
token. Most of the large ones have latent attention or mixtures of experts there: what does not fit
is named and refused, never left out.

Shape legend: V vocabulary, E hidden size, F feed-forward size, Q query columns, K key columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters.mtp.module import MtpModule
from foredraft.models.base import ModelShape, TargetParts
from foredraft.models.json_files import read_json
from foredraft.models.safety import check_safetensors


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

_REAL = ("rms_norm_eps", "rope_theta")
_LAYER = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "output.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}


def is_native(directory: Path) -> bool:
    """Whether a directory is a model's checkpoint, not a head's."""
    return (directory / "config.json").is_file() and not (directory / "head.json").is_file()


def read_native(directory: Path, parts: TargetParts) -> MtpModule:
    """The MTP layer that a checkpoint comes with; of several the first.

    Args:
        parts: of the target, whose final norm and head it shares.

    Raises:
        ConfigError: there is none, or one that is not as a llama layer.
        ModelLoadError: the checkpoint is damaged.
    """
    shape = _shape(directory)
    with ExitStack() as stack:
        tensors = _Tensors(directory, stack)
        layout, prefix = _find(tensors.names, directory)
        weights = _weights(layout, tensors.below(prefix, layout), directory)
    ids_V = torch.arange(shape.vocab_size)
    ones_1E = torch.ones(1, shape.hidden_size, dtype=parts.dtype, device=parts.device)
    target_norm_E = parts.norm(ones_1E)[0] * (1.0 + shape.rms_norm_eps) ** 0.5
    weights |= {"target_norm.weight": target_norm_E, "output": parts.head_rows(ids_V)}
    module = MtpModule(shape, None, layout.returns)
    _check_shapes(module, weights, directory)
    module.load_state_dict({name: tensor.float().cpu() for name, tensor in weights.items()})
    return module.eval()


class _Tensors:
    """All tensors of a checkpoint's files by name, read when asked for."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            names = check_safetensors(path)
            file = stack.enter_context(safe_open(str(path), framework="pt"))
            self._files |= dict.fromkeys(names, file)

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def below(self, prefix: str, layout: Layout) -> dict[str, Tensor]:
        """Those whose name begins so, by the rest of it."""
        return {
            name.removeprefix(prefix): file.get_tensor(name)
            for name, file in self._files.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in layout.unused
        }


def _find(names: Sequence[str], directory: Path) -> tuple[Layout, str]:
    for layout in LAYOUTS:
        pattern = re.compile(f"({layout.prefix}){re.escape(layout.join)}$")
        found = [match for name in names if (match := pattern.match(name))]
        if found:
            return layout, min(found, key=lambda m: int(m[2]) if m.re.groups > 1 else 0)[1]
    families = ", ".join(layout.family for layout in LAYOUTS)
    raise ConfigError(
        f"{directory} holds no MTP layer under the names of {families}; train one: foredraft train "
        "mtp"
    )


def _weights(layout: Layout, found: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Under the names of `MtpModule`."""
    names = {
        "embedding_norm.weight": (layout.embedding_norm,),
        "hidden_norm.weight": (layout.hidden_norm,),
        "join.weight": (layout.join,),
        "norm.weight": (layout.norm,),
    } | {
        f"layer.{mine}": tuple(layout.layer + theirs for theirs in parts)
        for mine, parts in _LAYER.items()
    }
    expected = {name for parts in names.values() for name in parts}
    if strange := sorted(found.keys() - expected):
        raise ConfigError(
            f"the {layout.family} MTP layer in {directory} is not as a llama layer: it has "
            f"{strange[0]!r}{_more(strange)}, which there is no place for. Train one: foredraft "
            "train mtp"
        )
    if missing := sorted(expected - found.keys()):
        raise ConfigError(
            f"the {layout.family} MTP layer in {directory} lacks {missing[0]!r}{_more(missing)}"
        )
    weights = {mine: torch.cat([found[name] for name in parts]) for mine, parts in names.items()}
    if layout.less_one:
        weights |= {n: w.float() + 1.0 for n, w in weights.items() if n.endswith("norm.weight")}
    if layout.hidden_first:
        weights["join.weight"] = weights["join.weight"].roll(len(weights["join.weight"]), 1)
    return weights


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_shapes(module: MtpModule, weights: Mapping[str, Tensor], directory: Path) -> None:
    for name, own in module.state_dict().items():
        if weights[name].shape != own.shape:
            raise ModelLoadError(
                f"the MTP layer in {directory}: {name} has shape {[*weights[name].shape]}, and the "
                f"config asks for {[*own.shape]}"
            )


def _shape(directory: Path) -> ModelShape:
    """As ``config.json`` has it.

    Raises:
        ModelLoadError: a size is missing or is none.
    """
    path = directory / "config.json"
    config = read_json(path)
    heads = config.get("num_attention_heads", 0)
    usual = {
        "num_key_value_heads": heads,
        "head_dim": config.get("hidden_size", 0) // max(1, heads),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    try:
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(ModelShape)):
            kind = float if name in _REAL else int
            values[name] = kind(config.get(name) or usual[name])
        return ModelShape(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path} lacks a size that its MTP layer needs: {error}") from None
