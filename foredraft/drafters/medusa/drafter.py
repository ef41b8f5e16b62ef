"""Drafting with Medusa's heads: one product gives all depths, then a tree is made of them.

Shape legend: N rows that draft, H heads, E hidden size, R output rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foredraft.core.choices import Choice, DrawnChoices
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.drafters.base import BaseDrafter, DraftRow, Observation
from foredraft.drafters.common.best_first import best_first
from foredraft.drafters.common.last_hidden import LastHidden
from foredraft.drafters.common.output_rows import OutputRows
from foredraft.drafters.common.shapes import RANK_ACCEPTANCE, PlannedGrowth, planned_parents
from foredraft.drafters.medusa.module import MedusaModule
from foredraft.models.base import HeadTarget, HeadWeights


class MedusaDrafter(BaseDrafter):
    """See the module docstring.

    A head does not know what the others chose, so all nodes of a depth have the same children, and
    a node's chance is the product of those on its path: the tree takes the best ones, as many as
    are worth their price. Drawn requests get a tree whose shape is fixed before anything is drawn.

    Args:
        module: the trained heads.
        target: their target.
        width: children looked at for each node; 1 makes chains.
    """

    def __init__(self, module: MedusaModule, target: HeadTarget, width: int = 4) -> None:
        parts = target.parts
        norm_E, output_RE = module.output_norm.weight.detach(), module.output.detach()
        self._rows_runner = target.head_runner(HeadWeights([], norm_E, output_RE, module.shape))
        self._module = module.to(parts.device, parts.dtype).eval()
        self._rows = OutputRows(module.output_ids_R, target.vocab_size)
        self._width = width if target.capabilities.tree_attention else 1
        self.taps, self.promise = module.taps, module.promise
        self._last = LastHidden(module.taps[0])

    def observe(self, observations: Sequence[Observation]) -> None:
        self._last.observe(observations)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        hidden = {row.request_id: self._last.of(row) for row in rows if row.budget}
        known = {request_id: x_E for request_id, x_E in hidden.items() if x_E is not None}
        if not known:
            return [NO_PROPOSAL] * len(rows)
        count = max(row.budget for row in rows)
        found = self._logits(torch.stack([*known.values()]), count)
        logits = dict(zip(known, found, strict=True))
        return [
            self._draft(row, logits[row.request_id]) if row.request_id in known else NO_PROPOSAL
            for row in rows
        ]

    def end(self, request_id: int) -> None:
        self._last.end(request_id)

    @torch.no_grad()
    def _logits(self, hidden_NE: Tensor, count: int) -> Tensor:
        """[N, H, R] of the first ``count`` heads."""
        projected_NHE = self._module.projected(hidden_NE, count)
        _, logits_MR = self._rows_runner.run([], projected_NHE.flatten(0, 1))
        return logits_MR.view(*projected_NHE.shape[:2], -1)

    def _draft(self, row: DraftRow, logits_HR: Tensor) -> Proposal:
        if isinstance(row.choices, DrawnChoices):
            return self._drawn(row, logits_HR)
        return self._chosen(row, logits_HR)

    def _chosen(self, row: DraftRow, logits_HR: Tensor) -> Proposal:
        # Rules that look at the text see the likeliest path: heads know of no other.
        levels, path = list[list[Choice]](), list[int]()
        for logits_R in logits_HR[: row.budget]:
            (found,) = self._rows.choices(row, logits_R[None], [path], self._width)
            if not found:
                break
            levels.append(found)
            path = [*path, found[0].token]

        def children(depth: int) -> Iterator[tuple[int, float, int]]:
            if depth < len(levels):
                yield from ((token, chance, depth + 1) for token, chance in levels[depth])

        tree = best_first(0, children, row, branch=self._width > 1, is_weighed=True)
        return Proposal.chosen(tree)

    def _drawn(self, row: DraftRow, logits_HR: Tensor) -> Proposal:
        parents = planned_parents(RANK_ACCEPTANCE[: self._width], row.budget, len(logits_HR))
        growth = PlannedGrowth(row, parents)
        for logits_R in logits_HR:
            if growth.frontier:
                growth.extend(self._rows.spread(logits_R).expand(len(growth.frontier), -1))
        return growth.build()
