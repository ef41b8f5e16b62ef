"""A trained head and the text's own repetitions, in one tree.

At each node that the head scores, its logits, the continuation of the longest earlier match and,
if there is one, a table of the target's earlier text are blended into one distribution. Where a
copy is nearly sure, at the root or later, or the head's forwards are used up, the copy alone
continues. So each token comes from the source that is likelier right; none has precedence.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.choices import Choice
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.drafters.base import DraftRow
from foredraft.drafters.growth import GROWTH_OPTIONS, SURE, GrowthLimits, growth_limits
from foredraft.drafters.guide import Guide, best_first
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.heads.steps import StepDrafter
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.text.table import NgramTable, found_table, new_text
from foredraft.drafters.trained import HEAD_OPTION, trained_head
from foredraft.models.base import HeadTarget, offered


class BlendDrafter(StepDrafter):
    """See the module docstring.

    Args:
        limits: how far a tree may grow by the head.
        table: of the target's earlier text.
    """

    def __init__(
        self,
        module: HiddenHeadModule,
        target: HeadTarget,
        limits: GrowthLimits | None = None,
        table: NgramTable | None = None,
    ) -> None:
        super().__init__(module, target, limits)
        self._texts: dict[int, Guide] = {}
        self._table = table
        self._may_branch = target.capabilities.tree_attention

    def begin(self, row: DraftRow) -> None:
        super().begin(row)
        self._texts[row.request_id] = new_text(row, self._table)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        copied = {row.request_id: self._copied(row) for row in rows if self._is_sure(row)}
        others = [row for row in rows if row.request_id not in copied]
        asked = zip(others, super().propose(others), strict=True)
        found = copied | {row.request_id: proposal for row, proposal in asked}
        return [found[row.request_id] for row in rows]

    def _is_sure(self, row: DraftRow) -> bool:
        """Whether a copy is nearly certain from the first token on: then the head need not run."""
        if not row.budget or row.params.coupling == "drawn":
            return False
        text = self._texts[row.request_id]
        choices = [Choice(token, prob) for token, prob, _ in text.successors(text.place)]
        return bool(choices) and row.weigh(choices, 0)[0].chance >= SURE

    def _copied(self, row: DraftRow) -> Proposal:
        text = self._texts[row.request_id]
        return Proposal.chosen(best_first(text.place, text.successors, row, self._may_branch))

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            for token in seen.committed:
                self._texts[seen.request_id].commit(token)
        super().observe(observations)

    def end(self, request_id: int) -> None:
        self._texts.pop(request_id, None)
        super().end(request_id)

    def guide(self, request_id: int) -> Guide:
        return self._texts[request_id]


def _build(context: DrafterContext) -> BlendDrafter:
    limits, head = growth_limits(context), trained_head(context, HiddenHeadModule)
    table = found_table(context, "table")
    return BlendDrafter(head, offered(context.target.capabilities.cache_layers), limits, table)


DRAFTER = DrafterSpec(
    build=_build,
    summary="a trained head and copies of earlier text, in one tree",
    options={
        **HEAD_OPTION,
        **GROWTH_OPTIONS,
        "table": "directory of a table that joins in (the one that comes with the model, if any)",
    },
    num_draft_tokens=16,
    needs=("parts", "cache_layers"),
    trained=HiddenHeadModule.kind,
)
