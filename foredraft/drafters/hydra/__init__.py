"""Hydra: a trained head without attention drafts step by step from the last hidden state."""

from typing import cast

from foredraft.drafters.base import DrafterContext, DrafterSpec
from foredraft.drafters.common.trained import (
    GROWTH_OPTIONS,
    HEAD_OPTION,
    growth_limits,
    trained_head,
)
from foredraft.drafters.hydra.drafter import HydraDrafter
from foredraft.drafters.hydra.module import HydraModule
from foredraft.models.base import Capabilities, HeadTarget


def _build(context: DrafterContext) -> HydraDrafter:
    limits, module = growth_limits(context), trained_head(context, HydraModule)
    return HydraDrafter(module, cast(HeadTarget, context.target), limits)


DRAFTER = DrafterSpec(
    build=_build,
    summary="a trained head without attention drafts step by step from the last hidden state",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=8,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
