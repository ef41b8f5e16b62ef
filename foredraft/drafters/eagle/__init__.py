"""EAGLE: a trained layer on the target's hidden states drafts a tree, token by token."""

from foredraft.drafters.base import DrafterSpec
from foredraft.drafters.common.trained import GROWTH_OPTIONS, HEAD_OPTION, built_with
from foredraft.drafters.eagle.drafter import EagleDrafter
from foredraft.drafters.eagle.module import EagleModule
from foredraft.models.base import Capabilities

DRAFTER = DrafterSpec(
    build=built_with(EagleModule, EagleDrafter),
    summary="a trained layer on the target's hidden states drafts a tree, token by token",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=16,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
