"""No drafting: plain decoding is the same step with an empty tree."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.spec import DrafterSpec


class NoDrafter(BaseDrafter):
    traits = DrafterTraits(learns=False)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [NO_PROPOSAL] * len(rows)


DRAFTER = DrafterSpec(
    build=lambda context: NoDrafter(),
    summary="plain decoding, nothing drafted",
    num_draft_tokens=0,
)
