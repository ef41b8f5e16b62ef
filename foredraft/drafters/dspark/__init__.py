"""DSpark: a trained backbone drafts a block in one forward, a Markov head fits it together."""

from typing import cast

from foredraft.drafters.base import DrafterContext, DrafterSpec
from foredraft.drafters.common.trained import HEAD_OPTION, trained_head
from foredraft.drafters.dspark.drafter import DsparkDrafter
from foredraft.drafters.dspark.module import DsparkModule
from foredraft.models.base import Capabilities, HeadTarget


def _build(context: DrafterContext) -> DsparkDrafter:
    return DsparkDrafter(trained_head(context, DsparkModule), cast(HeadTarget, context.target))


DRAFTER = DrafterSpec(
    build=_build,
    summary="a trained backbone drafts a block in one forward, fitted together by a Markov head",
    options={**HEAD_OPTION},
    num_draft_tokens=7,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
