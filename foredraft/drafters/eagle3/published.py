"""EAGLE heads under the names of their publishers, read and written.

Layouts: that of EAGLE's authors (SafeAILab/EAGLE), which SpecForge and SGLang share, and that of
vLLM's speculators. They hold the same tensors; the layer is called ``midlayer`` in the one and
``layers.0`` in the other, and the sizes are at the top of ``config.json`` or below
``transformer_layer_config``. A vocabulary of fewer rows comes as ``d2t``, what is added to a row's
number to get its token, and ``t2d``, which tokens have a row.

Layers are numbered by what goes into them, so that number n is the output of our layer n - 1; in
SpecForge's ``eagle_config`` by what comes out.

Shape legend: V vocabulary, E hidden size, R output rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from foredraft.drafters.eagle3.first import FirstEagleModule
from foredraft.drafters.eagle3.module import Eagle3Module, published_taps
from foredraft.models.base import HeadTarget, ModelShape, TargetParts
from foredraft.models.files.json_files import read_json

_LAYERS = ("layers.0.", "midlayer.")
_TOKEN_NORM, _STATE_NORM = "input_layernorm.weight", "hidden_norm.weight"
_TARGETS = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""What is the target's own and may be there as well."""
_MAPS = ("d2t", "t2d")
_SAMPLED_ROWS = 256
_ADVICE = "Train one for this target: foredraft train eagle"


@dataclass(frozen=True)
class _Published:
    """A checkpoint that is being read.

    Attributes:
        where: its directory, for messages.
        config: all of ``config.json``.
        shape: the layer's, with the target's vocabulary and number of layers.
        tensors: by name, those of the target left out.
        layer: what the layer's names begin with.
    """

    where: Path
    config: Mapping[str, Any]
    shape: ModelShape
    tensors: Mapping[str, Tensor]
    layer: str

    @property
    def what(self) -> str:
        return f"the EAGLE head in {self.where}"


def read_published(directory: Path, target: HeadTarget) -> Eagle3Module | FirstEagleModule:
    """A head from somebody's checkpoint: EAGLE-3, or EAGLE-1 and 2, told apart by their tensors.

    Args:
        target: its target.

    Raises:
        ConfigError: there is no such head, it is of another target, or something of it has no
            place here.
        ModelLoadError: the checkpoint is damaged.
    """
    parts, vocab_size = target.parts, target.vocab_size
    config = read_json(directory / "config.json")
    sizes = _sizes(config, directory)
    shape = shape_of({"vocab_size": vocab_size, **sizes}, directory / "config.json")
    _check_fits(shape, parts, vocab_size, directory)
    with ExitStack() as stack:
        tensors = CheckpointTensors(directory, stack)
        layer = next((p for p in _LAYERS if any(n.startswith(p) for n in tensors.names)), None)
        if layer is None or "fc.weight" not in tensors.names:
            raise ConfigError(
                f"{directory} holds no EAGLE head: there is no fc.weight beside a layer "
                f"{' or '.join(_LAYERS)}*. {_ADVICE}"
            )
        found = tensors.below("")
    _check_embeddings(found.get(_TARGETS[0]), parts, directory)
    own = {name: tensor for name, tensor in found.items() if name not in _TARGETS}
    shape = replace(shape, num_hidden_layers=len(target.capabilities.taps))
    published = _Published(directory, config, shape, own, layer)
    return _read_third(published, parts) if layer + _STATE_NORM in own else _read_first(
        published, parts
    )  # fmt: skip


def _sizes(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """The part of a config that has the layer's sizes; what cannot be run is refused."""
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ConfigError(f"{directory} holds a speculator of type {kind!r:.40}, not 'eagle3'")
    sizes: Mapping[str, Any] = config.get("transformer_layer_config") or config
    rope = sizes.get("rope_scaling") or sizes.get("rope_parameters") or {}
    differs = {
        "num_hidden_layers": sizes.get("num_hidden_layers", 1) != 1,
        "hidden_act": sizes.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(sizes.get("attention_bias")),
        "rope_scaling": (rope.get("rope_type") or rope.get("type") or "default") != "default",
        "target_hidden_size": (config.get("target_hidden_size") or sizes.get("hidden_size"))
        != sizes.get("hidden_size"),
    }
    for name, is_other in differs.items():
        if is_other:
            value = config.get(name, sizes.get(name))
            raise ConfigError(
                f"the EAGLE head in {directory} has {name} {value!r:.60}, which is not run here: "
                f"one layer, silu, plain rotary embedding, as wide as the target. {_ADVICE}"
            )
    return sizes


def _check_fits(shape: ModelShape, parts: TargetParts, vocab_size: int, directory: Path) -> None:
    theirs, ours = (shape.hidden_size, shape.vocab_size), (parts.hidden_size, vocab_size)
    if theirs != ours:
        raise ConfigError(
            f"the EAGLE head in {directory} is for a target {theirs[0]} wide with {theirs[1]} "
            f"tokens, and this one is {ours[0]} wide with {ours[1]}"
        )


def _check_embeddings(stored_VE: Tensor | None, parts: TargetParts, directory: Path) -> None:
    """A head reads the target's embeddings: those that it brings must be the same."""
    if stored_VE is None:
        return
    ids = torch.arange(0, len(stored_VE), max(1, len(stored_VE) // _SAMPLED_ROWS))
    own = parts.embed(ids).float().cpu()
    theirs = stored_VE[ids].float()
    if own.shape != theirs.shape or (own - theirs).norm() > 0.01 * own.norm():
        raise ConfigError(
            f"the EAGLE head in {directory} brings other embeddings than the target's: it was "
            f"trained for another target, or with embeddings of its own. {_ADVICE}"
        )


# ---------------------------------------------------------------------------------- EAGLE-1, 2


def _read_first(published: _Published, parts: TargetParts) -> FirstEagleModule:
    has_bias = "fc.bias" in published.tensors
    names = {"join.weight": ("fc.weight",), **layer_names(published.layer)}
    del names["layer.attention_norm.weight"]
    if has_bias:
        names["join.bias"] = ("fc.bias",)
    weights = under_our_names(published.tensors, names, published.what, _ADVICE)
    weights |= {
        "target_norm.weight": final_norm(parts, published.shape.rms_norm_eps),
        "output": parts.head_rows(torch.arange(published.shape.vocab_size)),
    }
    module = FirstEagleModule(published.shape, has_bias)
    fill(module, weights, published.what)
    return module


# ------------------------------------------------------------------------------------- EAGLE-3


def _read_third(published: _Published, parts: TargetParts) -> Eagle3Module:
    tensors, shape, config = published.tensors, published.shape, published.config
    ids_R = _output_ids(published)
    num_norms = sum(name.startswith("fc_norm.") for name in tensors)
    tap_norms = "each" if num_norms else "all" if "input_norm.weight" in tensors else "none"
    width = tensors["fc.weight"].shape[-1]
    module = Eagle3Module(
        shape,
        _taps(config, width // shape.hidden_size, shape.num_hidden_layers, published.what),
        None if ids_R is None else len(ids_R),
        tap_norms,
        "normed" if config.get("norm_before_residual") else "plain",
        "normed" if config.get("norm_output") else "plain",
    )
    shared = () if "lm_head.weight" in tensors else ("output",)
    wanted = {n: t for n, t in names_of(module, published.layer).items() if n not in shared}
    own = {name: tensor for name, tensor in tensors.items() if name not in _MAPS}
    weights = under_our_names(own, wanted, published.what, _ADVICE)
    if shared:
        rows = torch.arange(shape.vocab_size) if ids_R is None else ids_R
        weights["output"] = parts.head_rows(rows)
    if ids_R is not None:
        # Rows in the order of their tokens.
        weights["output_ids_R"], order = ids_R.sort()
        weights["output"] = weights["output"][order.to(weights["output"].device)]
    fill(module, weights, published.what)
    return module


def names_of(module: Eagle3Module, layer: str) -> dict[str, tuple[str, ...]]:
    """Our names of a head's weights, and theirs.

    Args:
        layer: what the layer's names begin with, such as ``layers.0.``.
    """
    count = len(module.tap_norms)
    norms = [f"fc_norm.{i}.weight" for i in range(count)]
    if module.config["tap_norms"] == "all":
        norms = ["input_norm.weight"]
    return {
        **{f"tap_norms.{i}.weight": (name,) for i, name in enumerate(norms)},
        "join_taps.weight": ("fc.weight",),
        "norm.weight": ("norm.weight",),
        "output": ("lm_head.weight",),
        **layer_names(layer),
        "layer.attention_norm.weight": (layer + _STATE_NORM,),
        "layer.token_norm.weight": (layer + _TOKEN_NORM,),
    }


def _taps(config: Mapping[str, Any], count: int, num_layers: int, what: str) -> Sequence[int]:
    key = "eagle_aux_hidden_state_layer_ids"
    read, inner = config.get(key), (config.get("eagle_config") or {}).get(key)
    taps = [int(n) - 1 for n in read] if read else [*(inner or published_taps(num_layers))]
    if len(taps) != count or taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < num_layers:
        raise ConfigError(
            f"{what} reads {count} layers of its target, and its config names the outputs of "
            f"{taps}; there are {num_layers}, and they have to ascend"
        )
    return taps


def _output_ids(published: _Published) -> Tensor | None:
    """The token of each output row; None: all of them."""
    offsets_R, has_row_V = (published.tensors.get(name) for name in _MAPS)
    if offsets_R is None:
        return None
    ids_R, whole = torch.arange(len(offsets_R)) + offsets_R.long(), published.shape.vocab_size
    named = sorted(set(ids_R.tolist()))
    if not named or named[0] < 0 or named[-1] >= whole or len(named) < len(ids_R):
        raise ModelLoadError(f"{published.what}: d2t does not name {len(ids_R)} of {whole} tokens")
    agree = has_row_V is None or has_row_V.nonzero().flatten().tolist() == named
    if not agree:
        raise ModelLoadError(f"{published.what}: d2t and t2d name different tokens")
    return None if len(ids_R) == whole else ids_R


# ------------------------------------------------------------------------------------- writing


def published_tensors(module: Eagle3Module) -> dict[str, Tensor]:
    """A head's weights in bfloat16 under the names of speculators, with both maps."""
    own, shape, found = module.state_dict(), module.shape, dict[str, Tensor]()
    query, key = (
        count * shape.head_dim for count in (shape.num_attention_heads, shape.num_key_value_heads)
    )
    sizes = {"layer.qkv.weight": [query, key, key]}
    for mine, theirs in names_of(module, _LAYERS[0]).items():
        each = len(own[mine]) // len(theirs)
        pieces = own[mine].split(sizes.get(mine, each))
        found |= {n: p.bfloat16().contiguous() for n, p in zip(theirs, pieces, strict=True)}
    if module.output_ids_R is not None:
        ids_R = module.output_ids_R.cpu()
        has_row_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
        has_row_V[ids_R] = True
        found |= {"d2t": ids_R - torch.arange(len(ids_R)), "t2d": has_row_V}
    return found


def published_config(module: Eagle3Module) -> dict[str, Any]:
    """What a speculators ``config.json`` says of a head itself; see `foredraft.train.export`."""
    shape, chosen = module.shape, module.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(module.output),
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in module.taps],
        "fc_norm": chosen["tap_norms"] == "each",
        "norm_before_fc": chosen["tap_norms"] == "all",
        "norm_before_residual": chosen["residual"] == "normed",
        "norm_output": chosen["returns"] == "normed",
        "transformer_layer_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "num_hidden_layers": 1,
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
        },
    }
