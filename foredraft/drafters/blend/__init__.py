"""A trained head and the text's own repetitions, in one tree.

At each node that the head scores, what it says and what followed the longest earlier match become
one opinion. Where a copy is nearly sure, at the root or later, or the head's forwards are used up,
the copy alone goes on. So each token is proposed by whoever is likelier right about it, and nobody
goes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.choices import Choice
from foredraft.core.proposal import Proposal
from foredraft.drafters.base import DrafterSpec, DraftRequest, DraftRow, Observation
from foredraft.drafters.common.best_first import best_first
from foredraft.drafters.common.growing import SURE, GrowthLimits
from foredraft.drafters.common.trained import GROWTH_OPTIONS, HEAD_OPTION, built_with
from foredraft.drafters.eagle.drafter import EagleDrafter
from foredraft.drafters.eagle.module import EagleModule
from foredraft.drafters.suffix import SuffixText
from foredraft.models.base import Capabilities, HeadTarget


class BlendDrafter(EagleDrafter):
    """See the module docstring.

    Args:
        module: a trained head.
        target: its target.
        limits: how far a tree may grow by the head.
    """

    def __init__(
        self, module: EagleModule, target: HeadTarget, limits: GrowthLimits | None = None
    ) -> None:
        super().__init__(module, target, limits)
        self._texts: dict[int, SuffixText] = {}
        self._may_branch = target.capabilities.tree_attention

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._texts[request.request_id] = SuffixText(request.tokens)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        copied = {row.request_id: self._copied(row) for row in rows if self._is_sure(row)}
        others = [row for row in rows if row.request_id not in copied]
        asked = zip(others, super().propose(others), strict=True)
        found = copied | {row.request_id: proposal for row, proposal in asked}
        return [found[row.request_id] for row in rows]

    def _is_sure(self, row: DraftRow) -> bool:
        """Whether a copy is nearly certain from the first token on: then nobody need be asked."""
        if not row.budget or row.params.coupling == "drawn":
            return False
        text = self._texts[row.request_id]
        choices = [Choice(token, prob) for token, prob, _ in text.successors(text.place)]
        return bool(choices) and row.weigh(choices, 0)[0].chance >= SURE

    def _copied(self, row: DraftRow) -> Proposal:
        text = self._texts[row.request_id]
        return Proposal.chosen(best_first(text.place, text.successors, row, self._may_branch))

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            for token in seen.committed:
                self._texts[seen.request_id].commit(token)
        super().observe(observations)

    def end(self, request_id: int) -> None:
        self._texts.pop(request_id, None)
        super().end(request_id)

    def guide(self, request_id: int) -> SuffixText:
        return self._texts[request_id]


DRAFTER = DrafterSpec(
    build=built_with(EagleModule, BlendDrafter),
    summary="a trained head and copies of earlier text, in one tree",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=16,
    needs=Capabilities(parts=True, cache_layers=True),
    required_options=("head",),
)
