"""EAGLE heads in their published shape, those of other trainers included."""

from foredraft.drafters.base import DrafterSpec
from foredraft.drafters.common.growing import GrowthLimits
from foredraft.drafters.common.steps import ModuleDrafter
from foredraft.drafters.common.trained import GROWTH_OPTIONS, HEAD_OPTION, built_with
from foredraft.drafters.eagle3.drafter import Eagle3Drafter
from foredraft.drafters.eagle3.first import FirstEagleDrafter, FirstEagleModule
from foredraft.drafters.eagle3.module import Eagle3Module
from foredraft.drafters.eagle3.published import read_published
from foredraft.models.base import Capabilities, HeadTarget


def _drafter(
    module: Eagle3Module | FirstEagleModule, target: HeadTarget, limits: GrowthLimits
) -> ModuleDrafter:
    kind = FirstEagleDrafter if isinstance(module, FirstEagleModule) else Eagle3Drafter
    return kind(module, target, limits)


DRAFTER = DrafterSpec(
    build=built_with(Eagle3Module, _drafter, read_published),
    summary="EAGLE heads in their published shape, those of other trainers included",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=16,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
