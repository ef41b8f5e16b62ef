"""EAGLE: a trained layer on the target's hidden states drafts a tree, token by token."""

from typing import cast

from foredraft.drafters.base import DrafterContext, DrafterSpec
from foredraft.drafters.common.trained import (
    GROWTH_OPTIONS,
    HEAD_OPTION,
    growth_limits,
    trained_head,
)
from foredraft.drafters.eagle.drafter import EagleDrafter
from foredraft.drafters.eagle.module import EagleModule
from foredraft.models.base import Capabilities, HeadTarget


def _build(context: DrafterContext) -> EagleDrafter:
    limits, module = growth_limits(context), trained_head(context, EagleModule)
    return EagleDrafter(module, cast(HeadTarget, context.target), limits)


DRAFTER = DrafterSpec(
    build=_build,
    summary="a trained layer on the target's hidden states drafts a tree, token by token",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=8,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
