"""Medusa: heads on the target's last hidden state guess several later tokens at once."""

from typing import cast

from foredraft.drafters.base import DrafterContext, DrafterSpec
from foredraft.drafters.common.options import checked_count
from foredraft.drafters.common.trained import HEAD_OPTION, trained_head
from foredraft.drafters.medusa.drafter import MedusaDrafter
from foredraft.drafters.medusa.module import MedusaModule
from foredraft.models.base import Capabilities, HeadTarget


def _build(context: DrafterContext) -> MedusaDrafter:
    width = checked_count("width", context.options.get("width", 4))
    module = trained_head(context, MedusaModule)
    return MedusaDrafter(module, cast(HeadTarget, context.target), width)


DRAFTER = DrafterSpec(
    build=_build,
    summary="trained heads on the last hidden state guess several later tokens at once",
    options={**HEAD_OPTION, "width": "tokens looked at for each place; 1 drafts chains (4)"},
    num_draft_tokens=8,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
