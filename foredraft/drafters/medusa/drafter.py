"""Drafting with Medusa's heads: one product gives all depths, then a tree is made of them.

Shape legend: N rows that draft, H heads, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.drafters.base import BaseDrafter, DraftRow, Observation
from foredraft.drafters.common.best_first import best_first
from foredraft.drafters.common.last_hidden import LastHidden
from foredraft.drafters.common.rows import Spread
from foredraft.drafters.common.shapes import RANK_ACCEPTANCE, PlannedGrowth, planned_parents
from foredraft.drafters.medusa.module import MedusaModule
from foredraft.models.base import PartsTarget


class MedusaDrafter(BaseDrafter):
    """See the module docstring.

    A head does not know what the others chose, so all nodes of a depth have the same children, and
    a node's chance is the product of those on its path: the tree takes the best ones, as many as
    are worth their price. Drawn requests get a tree whose shape is fixed before anything is drawn.

    Args:
        target: has the capability ``parts``.
        module: the trained heads.
        width: children looked at for each node; 1 makes chains.
    """

    def __init__(self, target: PartsTarget, module: MedusaModule, width: int = 4) -> None:
        parts = target.parts
        self._module = module.to(parts.device, parts.dtype).eval()
        self._spread = Spread(module.output_ids_R, target.vocab_size)
        self._width = width
        self.taps = module.taps
        self._last = LastHidden(module.taps[0])

    def observe(self, observations: Sequence[Observation]) -> None:
        self._last.observe(observations)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        hidden = {row.request_id: self._last.of(row) for row in rows if row.budget}
        known = {request_id: x_E for request_id, x_E in hidden.items() if x_E is not None}
        if not known:
            return [NO_PROPOSAL] * len(rows)
        logits_NHV = self._logits(torch.stack([*known.values()]))
        logits = dict(zip(known, logits_NHV, strict=True))
        return [
            self._draft(row, logits[row.request_id]) if row.request_id in known else NO_PROPOSAL
            for row in rows
        ]

    def end(self, request_id: int) -> None:
        self._last.end(request_id)

    @torch.no_grad()
    def _logits(self, hidden_NE: Tensor) -> Tensor:
        states_NHE = torch.stack(self._module.states(hidden_NE), 1)
        logits_MV = self._spread(states_NHE.flatten(0, 1) @ self._module.output.T)
        return logits_MV.view(*states_NHE.shape[:2], -1)

    def _draft(self, row: DraftRow, logits_HV: Tensor) -> Proposal:
        if row.params.coupling == "drawn":
            return self._drawn(row, logits_HV)
        return self._chosen(row, logits_HV)

    def _chosen(self, row: DraftRow, logits_HV: Tensor) -> Proposal:
        # Rules that look at the text see the likeliest path: heads know of no other.
        choices, path = list[list[tuple[int, float]]](), list[int]()
        for logits_V in logits_HV[: row.budget]:
            found = row.choose(logits_V, path, self._width)
            if not found:
                break
            choices.append([*found])
            path.append(found[0].token)

        def children(depth: int) -> Iterator[tuple[int, float, int]]:
            if depth < len(choices):
                yield from ((token, chance, depth + 1) for token, chance in choices[depth])

        tree = best_first(0, children, row, branch=self._width > 1, is_weighed=True)
        return Proposal.chosen(tree)

    def _drawn(self, row: DraftRow, logits_HV: Tensor) -> Proposal:
        parents = planned_parents(RANK_ACCEPTANCE[: self._width], row.budget, len(logits_HV))
        growth = PlannedGrowth(row, parents)
        for logits_V in logits_HV:
            if growth.frontier:
                growth.extend(logits_V.expand(len(growth.frontier), -1))
        return growth.build()
