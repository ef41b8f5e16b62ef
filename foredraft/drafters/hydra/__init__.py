"""Hydra: a trained head without attention drafts step by step from the last hidden state."""

from foredraft.drafters.base import DrafterSpec
from foredraft.drafters.common.trained import GROWTH_OPTIONS, HEAD_OPTION, built_with
from foredraft.drafters.hydra.drafter import HydraDrafter
from foredraft.drafters.hydra.module import HydraModule
from foredraft.models.base import Capabilities

DRAFTER = DrafterSpec(
    build=built_with(HydraModule, HydraDrafter),
    summary="a trained head without attention drafts step by step from the last hidden state",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=8,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
