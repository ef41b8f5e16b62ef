"""Heads in other people's checkpoints: tensors by name, put under the names that are ours.

What does not fit is named and refused, never left out.

Shape legend: E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.base import ModelShape, TargetParts
from foredraft.models.files.safety import check_safetensors

LAYER_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "output.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}
"""Names of `LlamaLayer`, and of what lies below one another in each."""
_REAL = ("rms_norm_eps", "rope_theta")
_NEVER_NEEDED = ("rotary_emb.inv_freq",)


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is somebody's checkpoint, not a head that was saved here."""
    return (directory / "config.json").is_file() and not (directory / "head.json").is_file()


class CheckpointTensors:
    """All tensors of a checkpoint's files by name, read when asked for.

    Args:
        stack: closes the files.

    Raises:
        ModelLoadError: a file is damaged, or there are weights in a pickle only.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            names = check_safetensors(path)
            file = stack.enter_context(safe_open(str(path), framework="pt"))
            self._files |= dict.fromkeys(names, file)
        pickles = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt"))
        if not self._files and pickles:
            raise ModelLoadError(
                f"the weights in {directory} are a pickle ({pickles[0].name}), which may run any "
                "code and is never read; convert it to safetensors where you trust it"
            )

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def below(self, prefix: str, without: Iterable[str] = ()) -> dict[str, Tensor]:
        """Those whose name begins so, by the rest of it."""
        rest = {name: name.removeprefix(prefix) for name in self._files if name.startswith(prefix)}
        return {
            short: self._files[name].get_tensor(name)
            for name, short in rest.items()
            if short not in without and not short.endswith(_NEVER_NEEDED)
        }


def layer_names(prefix: str) -> dict[str, tuple[str, ...]]:
    """Our names of a decoder layer's tensors, below ``layer.``, and theirs, below ``prefix``."""
    return {
        f"layer.{mine}": tuple(prefix + theirs for theirs in parts)
        for mine, parts in LAYER_PARTS.items()
    }


def under_our_names(
    found: Mapping[str, Tensor], names: Mapping[str, Sequence[str]], what: str, advice: str
) -> dict[str, Tensor]:
    """Tensors that lie below one another, joined and renamed.

    Args:
        names: ours, and theirs for each.
        what: whose they are, for messages.
        advice: what to do instead.

    Raises:
        ConfigError: there is one more, or one less.
    """
    expected = {name for parts in names.values() for name in parts}
    if strange := sorted(found.keys() - expected):
        raise ConfigError(
            f"{what} is not as a llama layer: it has {strange[0]!r}{_more(strange)}, which there "
            f"is no place for. {advice}"
        )
    if missing := sorted(expected - found.keys()):
        raise ConfigError(f"{what} lacks {missing[0]!r}{_more(missing)}")
    return {mine: torch.cat([found[name] for name in parts]) for mine, parts in names.items()}


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def fill(module: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Load weights, floating ones in float32, into a module whose shapes the config asked for.

    Raises:
        ModelLoadError: the shapes are others, or a weight is no number.
    """
    for name, own in module.state_dict().items():
        if weights[name].is_floating_point() and not weights[name].isfinite().all():
            raise ModelLoadError(f"{what}: {name} holds NaN or infinity")
        if weights[name].shape != own.shape:
            raise ModelLoadError(
                f"{what}: {name} has shape {[*weights[name].shape]}, and the config asks for "
                f"{[*own.shape]}"
            )
    module.load_state_dict(
        {n: w.float().cpu() if w.is_floating_point() else w.cpu() for n, w in weights.items()}
    )
    module.eval()


def final_norm(parts: TargetParts, eps: float) -> Tensor:
    """The weights [E] of the target's final norm."""
    ones_1E = torch.ones(1, parts.hidden_size, dtype=parts.dtype, device=parts.device)
    return parts.norm(ones_1E)[0] * math.sqrt(1.0 + eps)


def shape_of(config: Mapping[str, Any], where: Path) -> ModelShape:
    """Sizes as a ``config.json`` has them.

    Raises:
        ModelLoadError: a size is missing or is none.
    """
    heads = config.get("num_attention_heads", 0)
    rope = config.get("rope_parameters") or {}
    try:
        usual = {
            "num_key_value_heads": heads,
            "head_dim": config.get("hidden_size", 0) // max(1, heads),
            "rms_norm_eps": 1e-6,
            "rope_theta": rope.get("rope_theta", 10000.0),
        }
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(ModelShape)):
            kind = float if name in _REAL else int
            values[name] = kind(config.get(name) or usual[name])
        return ModelShape(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{where} lacks a size that its layer needs: {error}") from None
