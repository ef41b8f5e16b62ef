"""Drafters of trained heads: finding the head, and the options that they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from torch import nn

from foredraft.core.errors import ConfigError
from foredraft.drafters.base import Drafter, DrafterContext, DrafterFactory
from foredraft.drafters.common.checkpoints import is_checkpoint
from foredraft.drafters.common.growing import GrowthLimits
from foredraft.drafters.common.head import HeadModule
from foredraft.drafters.common.head_files import load_head
from foredraft.drafters.common.head_folder import identify
from foredraft.drafters.common.options import checked_count, checked_ms
from foredraft.drafters.common.shipped import shipped_head
from foredraft.models.base import HeadTarget, PartsTarget

M = TypeVar("M", bound=HeadModule)

HEAD_OPTION = MappingProxyType(
    {"head": "directory of the trained head (needed, but for models whose head is built in)"}
)

GROWTH_OPTIONS = MappingProxyType(
    {
        "max_depth": "most tokens on a path (6)",
        "width": "nodes that are looked below at once (4)",
        "branching": "tokens below one node, below the root three times as many; 1: chains (4)",
        "round_cost": "time of one forward of the head, in plain steps (0.1)",
    }
)
"""Options of heads that draft step by step; see `GrowthLimits`."""


def trained_head(context: DrafterContext, module: type[M], option: str = "head") -> M:
    """The head that the user named, or that comes with the package, checked against the target.

    Args:
        module: the class of its kind.
        option: what names its directory.

    Raises:
        ConfigError: none was named, it is not there, or it is of another kind or target.
        ModelLoadError: it is damaged.
    """
    given = context.options.get(option)
    if given is None and option == "head":
        given = shipped_head(module.kind, context.target)
    if given is None:
        kind = module.kind.replace("_", "-")
        raise ConfigError(
            f"drafter {kind!r} needs a trained head. Train one with 'foredraft train {kind} "
            f"--target MODEL --out DIR', and name its directory with the drafter option {option}"
        )
    tokenizer = getattr(context.tokenizer, "fingerprint", None)
    identity = identify(context.target, None, tokenizer)
    device = cast(PartsTarget, context.target).parts.device
    return load_head(Path(str(given)).expanduser(), module, identity, device=device)


def built_with(
    module: type[M],
    drafter: Callable[[Any, HeadTarget, GrowthLimits], Drafter],
    read: Callable[[Path, HeadTarget], nn.Module] | None = None,
) -> DrafterFactory:
    """What builds a drafter that grows trees with a trained head.

    Args:
        module: the class of the head's kind.
        drafter: made from the head, its target, and how far a tree may grow.
        read: reads a head from somebody's checkpoint; None: only heads that were saved here.
    """

    def build(context: DrafterContext) -> Drafter:
        limits, target = growth_limits(context), cast(HeadTarget, context.target)
        directory = Path(str(context.options.get("head", ""))).expanduser()
        if read is not None and is_checkpoint(directory):
            return drafter(read(directory, target), target, limits)
        return drafter(trained_head(context, module), target, limits)

    return build


def growth_limits(context: DrafterContext) -> GrowthLimits:
    """What the user makes of `GROWTH_OPTIONS`.

    Raises:
        ConfigError: an option does not fit.
    """
    options, usual = context.options, GrowthLimits()
    counts = {
        name: checked_count(name, options.get(name, getattr(usual, name)))
        for name in ("max_depth", "width", "branching")
    }
    cost = checked_ms("round_cost", options.get("round_cost", usual.round_cost))
    return GrowthLimits(**counts, round_cost=cost)
