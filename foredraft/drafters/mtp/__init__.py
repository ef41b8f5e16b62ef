"""Multi-token prediction: one trained layer carries the target's last state on, token by token."""

from pathlib import Path
from typing import cast

from foredraft.drafters.base import DrafterContext, DrafterSpec
from foredraft.drafters.common.checkpoints import is_checkpoint
from foredraft.drafters.common.trained import (
    GROWTH_OPTIONS,
    HEAD_OPTION,
    growth_limits,
    trained_head,
)
from foredraft.drafters.mtp.drafter import MtpDrafter
from foredraft.drafters.mtp.module import MtpModule
from foredraft.drafters.mtp.native import read_native
from foredraft.models.base import Capabilities, HeadTarget


def _build(context: DrafterContext) -> MtpDrafter:
    limits, target = growth_limits(context), cast(HeadTarget, context.target)
    directory = Path(str(context.options.get("head", ""))).expanduser()
    if is_checkpoint(directory):
        return MtpDrafter(read_native(directory, target.parts), target, limits)
    return MtpDrafter(trained_head(context, MtpModule), target, limits)


DRAFTER = DrafterSpec(
    build=_build,
    summary="one trained layer carries the target's last state on, token by token",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=8,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
