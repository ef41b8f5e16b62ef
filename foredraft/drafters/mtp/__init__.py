"""Multi-token prediction: trained layers carry the target's last state on, token by token."""

from foredraft.drafters.base import DrafterSpec
from foredraft.drafters.common.trained import GROWTH_OPTIONS, HEAD_OPTION, built_with
from foredraft.drafters.mtp.drafter import MtpDrafter
from foredraft.drafters.mtp.module import MtpModule
from foredraft.drafters.mtp.native import read_native
from foredraft.models.base import Capabilities

DRAFTER = DrafterSpec(
    build=built_with(MtpModule, MtpDrafter, read_native),
    summary="trained layers carry the target's last state on, token by token",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=8,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
