"""Published heads: tensors by name, renamed to foredraft's names.

Tensors that do not fit are refused by name, never left out.

Shape legend: E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, Field
from safetensors import safe_open
from torch import Tensor, nn

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters.heads.base import LARGEST_SIZE
from foredraft.models.base import HeadTarget, ModelShape, TargetParts
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
_NEVER_NEEDED = ("rotary_emb.inv_freq",)


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is a published checkpoint, not a head that foredraft saved."""
    return (directory / "config.json").is_file() and not (directory / "head.json").is_file()


def checkpoint_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's files by name, but for those that are computed here.

    Raises:
        ModelLoadError: a file is damaged, or there are weights in a pickle only.
    """
    paths = sorted(directory.glob("*.safetensors"))
    files = {name: path for path in paths for name in check_safetensors(path)}
    pickles = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt"))
    if not files and pickles:
        raise ModelLoadError(
            f"the weights in {directory} are a pickle ({pickles[0].name}), which may run any "
            "code and is never read; convert it to safetensors where you trust it"
        )
    found = dict[str, Tensor]()
    for name, path in files.items():
        if not name.endswith(_NEVER_NEEDED):
            with safe_open(str(path), framework="pt") as file:
                found[name] = file.get_tensor(name)
    return found


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

    Args:
        module: made on the device ``meta``, so that sizes are compared before memory is asked for.
        what: whose they are, for messages.

    Raises:
        ModelLoadError: there is one more or one less, its shape is another, or it is no number.
    """
    expected = module.state_dict()
    for name in expected.keys() ^ weights.keys():
        raise ModelLoadError(f"{what} {'lacks' if name in expected else 'holds'} {name!r}")
    for name, own in expected.items():
        weight = weights[name]
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ModelLoadError(f"{what}: {name} holds NaN or infinity")
        if weight.is_floating_point() != own.is_floating_point():
            raise ModelLoadError(f"{what}: {name} is of type {weight.dtype}")
        if weight.shape != own.shape:
            raise ModelLoadError(
                f"{what}: {name} has shape {[*weight.shape]}, and the config asks for "
                f"{[*own.shape]}"
            )
    whole = {n: w.float().cpu() if w.is_floating_point() else w.cpu() for n, w in weights.items()}
    module.load_state_dict(whole, assign=True)
    module.eval()


def final_norm(parts: TargetParts, eps: float) -> Tensor:
    """The weights [E] of the target's final norm."""
    ones_1E = torch.ones(1, parts.hidden_size, dtype=parts.dtype, device=parts.device)
    return parts.norm(ones_1E)[0] * math.sqrt(1.0 + eps)


Count = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]


class Rope(BaseModel):
    """How a config describes its rotary embedding, as far as it is looked at."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Field(gt=0.0, le=1e12)] | None = None

    @property
    def is_plain(self) -> bool:
        return (self.rope_type or self.type or "default") == "default"


class Sizes(BaseModel):
    """The sizes of a decoder layer as a ``config.json`` has them; further keys are left alone."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count = 1
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    rope_theta: Annotated[float, Field(gt=0.0, le=1e12)] | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None

    @property
    def shape(self) -> ModelShape:
        rope = self.rope_parameters or Rope()
        return ModelShape(
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.num_key_value_heads or self.num_attention_heads,
            self.head_dim or max(1, self.hidden_size // self.num_attention_heads),
            self.rms_norm_eps,
            self.rope_theta or rope.rope_theta or 10000.0,
        )


def check_fits(shape: ModelShape, target: HeadTarget, what: str) -> None:
    """Refuse a head of a target of other sizes.

    Raises:
        ConfigError: it is.
    """
    theirs = shape.hidden_size, shape.vocab_size
    ours = target.parts.hidden_size, target.vocab_size
    if theirs != ours:
        raise ConfigError(
            f"{what} is for a target {theirs[0]} wide with {theirs[1]} tokens, and this one is "
            f"{ours[0]} wide with {ours[1]}"
        )
