"""Layers that a checkpoint brings to predict further tokens, as their models' makers publish them.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): one more decoder layer of the model's own
kind behind a projection of two normed inputs, and a norm. Embeddings and head are the model's.

Shape legend: E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from foredraft.cache.layers import StoredLayers
from foredraft.core.errors import ModelLoadError
from foredraft.models.base import OwnLayers
from foredraft.models.files.safety import Checkpoint
from foredraft.models.files.tensors import StoredTensor
from foredraft.models.native.config import DecoderConfig, text_part
from foredraft.models.native.draft_layers import NativeHeadRunner
from foredraft.models.native.weights import Bits, DecoderWeights, Reader, assemble_layer


@dataclass(frozen=True)
class Layout:
    """Names of such a layer's tensors.

    Attributes:
        layer: before the names of the decoder layer's; others have their whole names, without
            ``.weight`` behind.
        state_first: the projection reads the state first and the embedding behind it.
    """

    token_norm: str
    state_norm: str
    join: str
    norm: str
    layer: str
    state_first: bool = False


def layout_of(tensors: Mapping[str, StoredTensor], num_layers: int) -> Layout | None:
    """The layout of a checkpoint's first such layer; None: it has none.

    Args:
        num_layers: of the model; DeepSeek's layer is the one behind these.
    """
    mimo = "model.mtp_layers.0."
    layouts = (
        Layout(  # Qwen3-Next, Qwen3.5
            *("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
            "mtp.layers.0.",
        ),
        _layout_behind(num_layers),
        Layout(
            *(f"{mimo}token_layernorm", f"{mimo}hidden_layernorm", f"{mimo}input_proj"),
            *(f"{mimo}final_layernorm", mimo),
            state_first=True,
        ),
    )
    return next((each for each in layouts if f"{each.join}.weight" in tensors), None)


def _layout_behind(num_layers: int) -> Layout:
    """As DeepSeek-V3, GLM-4.5 and GGUF files of any family have it: one more layer."""
    layer = f"model.layers.{num_layers}."
    norms = f"{layer}enorm", f"{layer}hnorm"
    return Layout(*norms, f"{layer}eh_proj", f"{layer}shared_head.norm", layer)


def shapes_behind(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """The tensors of such a layer behind those of a model; of experts those of the first alone."""
    layout, hidden = _layout_behind(config.num_hidden_layers), config.hidden_size
    reader = Reader(None, torch.float32, "meta", bits=None, tensors={})
    assemble_layer(reader, own_config(config), 0, layout.layer)
    norms = (layout.token_norm, layout.state_norm, layout.norm)
    return {
        **reader.asked,
        **{f"{norm}.weight": (hidden,) for norm in norms},
        f"{layout.join}.weight": (hidden, 2 * hidden),
    }


def read_own_layers(
    layout: Layout,
    checkpoint: Checkpoint,
    config: DecoderConfig,
    target: DecoderWeights,
    bits: Bits,
    layers: StoredLayers,
    fused: bool,
) -> OwnLayers:
    """Read the first such layer.

    Args:
        layout: of the checkpoint.
        config: of a model of this one layer; see `own_config`.
        target: whose head and embeddings it shares, and in whose form it is.
        bits: the form; see `foredraft.models.native.weights.load_weights`.
        layers: cache layers of its entries.
        fused: run it by the fused kernel.

    Raises:
        ModelLoadError: a tensor is missing, misshapen or not finite.
    """
    hidden, dtype = config.hidden_size, target.dtype
    reader = Reader(checkpoint, dtype, target.device, bits)
    layer = assemble_layer(reader, config, 0, layout.layer)
    small = Reader(checkpoint, torch.float32, target.device, None)
    offset = config.family.norm_offset
    norms = {
        name: small.take(f"{getattr(layout, name)}.weight", hidden)
        for name in ("token_norm", "state_norm", "norm")
    }
    join_EK = small.take(f"{layout.join}.weight", hidden, 2 * hidden)
    for each in (reader, small):
        each.raise_problems()
    token_EE, state_EE = join_EK.chunk(2, 1)
    if layout.state_first:
        token_EE, state_EE = state_EE, token_EE
    weights = replace(target, layers=(layer,), final_norm_E=norms["norm"], screen_VE=None)
    return OwnLayers(
        token_EE=token_EE * (norms["token_norm"] + offset),
        state_EE=state_EE,
        state_norm_E=norms["state_norm"] + offset,
        norm_E=norms["norm"] + offset,
        eps=config.rms_norm_eps,
        runner=NativeHeadRunner(config, weights, layers, fused),
    )


def own_config(config: DecoderConfig) -> DecoderConfig:
    """Of a model of one such layer: it attends, and has experts where others have.

    Raises:
        ModelLoadError: no layer of the model attends.
    """
    kinds = map(config.kind, range(config.num_hidden_layers))
    kind = next((kind for kind in kinds if kind.attends and kind.feeds), None)
    if kind is None:
        raise ModelLoadError(
            "a layer that predicts further tokens attends as others of its model, and none does"
        )
    experts = config.experts and replace(config.experts, num_dense=0)
    return replace(config, num_hidden_layers=1, kinds=(kind,), recurrent=None, experts=experts)


def has_own_layers(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint brings layers that predict further tokens."""
    num_layers = text_part(checkpoint.config).get("num_hidden_layers", 0)
    return layout_of(checkpoint.tensors, num_layers) is not None
