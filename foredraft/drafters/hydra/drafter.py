"""Drafting with Hydra's heads: a tree, one depth a product.

Shape legend: F frontier nodes of all rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.tree import ROOT
from foredraft.drafters.base import BaseDrafter, DraftRow, Observation
from foredraft.drafters.common.last_hidden import LastHidden
from foredraft.drafters.common.rows import Spread
from foredraft.drafters.common.shapes import BestFirstShape, Growth
from foredraft.drafters.hydra.module import HydraModule
from foredraft.models.base import PartsTarget


@dataclass
class _Growing:
    """A row's tree under construction.

    Attributes:
        hidden_E: of the text's last token that was read.
        states: by node, the state [E] that its children's logits were made of.
    """

    row: DraftRow
    growth: Growth
    hidden_E: Tensor
    states: dict[int, Tensor] = field(default_factory=dict)

    def inputs(self) -> list[tuple[Tensor, int]]:
        """For each frontier node the state before it, and its token."""
        tree = self.growth.tree
        return [
            (self.hidden_E, self.row.tokens[-1])
            if node == ROOT
            else (self.states[tree.parents[node]], tree.tokens[node])
            for node in self.growth.frontier
        ]


class HydraDrafter(BaseDrafter):
    """See the module docstring.

    Args:
        target: has the capability ``parts``.
        module: the trained heads.
        shape: how the trees grow.
    """

    def __init__(self, target: PartsTarget, module: HydraModule, shape: BestFirstShape) -> None:
        self._parts = target.parts
        self._module = module.to(self._parts.device, self._parts.dtype).eval()
        self._spread = Spread(module.output_ids_R, target.vocab_size)
        self._shape = shape
        self.taps = module.taps
        self._last = LastHidden(module.taps[0])

    def observe(self, observations: Sequence[Observation]) -> None:
        self._last.observe(observations)

    @torch.no_grad()
    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        growing = {}
        for row in rows:
            hidden_E = self._last.of(row)
            if row.budget and hidden_E is not None:
                growing[row.request_id] = _Growing(row, self._shape.grow(row), hidden_E)
        active, depth = [*growing.values()], 1
        while active:
            self._grow(active, depth)
            active = [each for each in active if each.growth.frontier]
            depth += 1
        return [
            growing[row.request_id].growth.build() if row.request_id in growing else NO_PROPOSAL
            for row in rows
        ]

    def end(self, request_id: int) -> None:
        self._last.end(request_id)

    def _grow(self, growing: Sequence[_Growing], depth: int) -> None:
        """Add one depth to each tree."""
        states, tokens = zip(*(pair for each in growing for pair in each.inputs()), strict=True)
        embedded_FE = self._parts.embed(torch.tensor(tokens))
        new_FE = self._module.step(depth, torch.stack(states), embedded_FE)
        logits_FV = self._spread(new_FE @ self._module.output.T)
        first = 0
        for each in growing:
            frontier = each.growth.frontier
            mine = slice(first, first + len(frontier))
            each.states.update(zip(frontier, new_FE[mine], strict=True))
            each.growth.extend(logits_FV[mine])
            first = mine.stop
