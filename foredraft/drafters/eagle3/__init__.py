"""EAGLE heads in their published shape, those of other trainers included."""

from pathlib import Path
from typing import cast

from foredraft.drafters.base import DrafterContext, DrafterSpec
from foredraft.drafters.common.checkpoints import is_checkpoint
from foredraft.drafters.common.steps import StepDrafter
from foredraft.drafters.common.trained import (
    GROWTH_OPTIONS,
    HEAD_OPTION,
    growth_limits,
    trained_head,
)
from foredraft.drafters.eagle3.drafter import Eagle3Drafter
from foredraft.drafters.eagle3.first import FirstEagleDrafter, FirstEagleModule
from foredraft.drafters.eagle3.module import Eagle3Module
from foredraft.drafters.eagle3.published import read_published
from foredraft.models.base import Capabilities, HeadTarget


def _build(context: DrafterContext) -> StepDrafter:
    limits, target = growth_limits(context), cast(HeadTarget, context.target)
    directory = Path(str(context.options.get("head", ""))).expanduser()
    if not is_checkpoint(directory):
        return Eagle3Drafter(trained_head(context, Eagle3Module), target, limits)
    num_layers = len(target.capabilities.taps)
    module = read_published(directory, target.parts, target.vocab_size, num_layers)
    if isinstance(module, FirstEagleModule):
        return FirstEagleDrafter(module, target, limits)
    return Eagle3Drafter(module, target, limits)


DRAFTER = DrafterSpec(
    build=_build,
    summary="EAGLE heads in their published shape, those of other trainers included",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=16,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
