"""From a user's options to one of the ways to exit early."""

from __future__ import annotations

from typing import Any, cast

from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.drafters.base import DrafterContext, DrafterSpec
from foredraft.drafters.common.chain import ChainDrafter, ModelPredictor
from foredraft.drafters.common.trained import trained_head
from foredraft.drafters.early_exit.adapted import AdaptedDrafter
from foredraft.drafters.early_exit.drafter import (
    SharedCacheDrafter,
    SharedCachePredictor,
    parse_skip,
)
from foredraft.drafters.early_exit.module import AdapterModule
from foredraft.models.base import Capabilities, LayeredTarget


def _check_exit_layer(exit_layer: object, num_layers: int) -> int:
    if type(exit_layer) is not int or not 1 <= exit_layer < num_layers:
        raise ConfigError(
            f"exit_layer is {exit_layer!r}; the target has {num_layers} layers, so it must be a "
            f"whole number from 1 to {num_layers - 1}"
        )
    return exit_layer


def _drafter(
    target: LayeredTarget, exit_layer: Any, skip: Any, min_confidence: float
) -> ChainDrafter:
    if skip is not None:
        if exit_layer is not None:
            raise ConfigError("exit_layer and skip are two ways to draft; give one of them")
        view = target.sublayer_view(*parse_skip(skip, target.num_layers))
        return ChainDrafter(ModelPredictor(view), min_confidence)
    if exit_layer is None:
        exit_layer = max(1, target.num_layers // 4)
    exit_layer = _check_exit_layer(exit_layer, target.num_layers)
    if target.capabilities.shallow:
        shared = SharedCachePredictor(target, target.shallow(exit_layer))
        return SharedCacheDrafter(shared, min_confidence)
    return ChainDrafter(ModelPredictor(target.layer_view(range(exit_layer))), min_confidence)


def _build_adapted(
    context: DrafterContext, target: LayeredTarget, min_confidence: float
) -> AdaptedDrafter:
    for name in ("exit_layer", "skip"):
        if name in context.options:
            raise ConfigError(f"adapter and {name} are two ways to draft; give one of them")
    for name in ("shallow", "parts", "cache_layers"):
        if not getattr(target.capabilities, name):
            raise CapabilityError(
                f"an adapter needs a target with {name}, which {type(target).__name__} does not "
                "offer"
            )
    return AdaptedDrafter(trained_head(context, AdapterModule, "adapter"), target, min_confidence)


def _build(context: DrafterContext) -> ChainDrafter:
    options = dict(context.options)
    min_confidence = options.pop("min_confidence", 0.0)
    if isinstance(min_confidence, bool) or not isinstance(min_confidence, int | float):
        raise ConfigError(f"min_confidence is {min_confidence!r}; it must be a number")
    if not 0.0 <= min_confidence <= 1.0:
        raise ConfigError(f"min_confidence is {min_confidence}; it must be between 0 and 1")
    target = cast(LayeredTarget, context.target)  # the registry has checked the capability
    if "adapter" in options:
        return _build_adapted(context, target, min_confidence)
    return _drafter(target, options.get("exit_layer"), options.get("skip"), min_confidence)


DRAFTER = DrafterSpec(
    build=_build,
    summary="the target's own first layers, or some of its sublayers, draft a chain",
    options={
        "exit_layer": "how many of the first layers draft (a quarter of them)",
        "skip": "sublayers to leave out instead, such as a4-6,m5,9",
        "adapter": "directory of a trained adapter, which knows its exit layer",
        "min_confidence": "end the draft where the likeliest token has less than this (0)",
    },
    num_draft_tokens=4,
    needs=Capabilities(layer_views=True),
)
