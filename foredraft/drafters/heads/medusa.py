"""Medusa's heads: each guesses one later token from the last hidden state, and from nothing else.

T. Cai et al., arXiv 2401.10774 (heads alone: the target stays as it is). Head k is a residual
block, ``x + SiLU(W x)``, and a projection of its own; the last norm and the output rows are
shared, so that a head costs two small matrices instead of a vocabulary.

Shape legend: B texts, L tokens, E hidden size, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.core.checks import checked_int
from foredraft.core.choices import Choice, DrawnChoices
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.record import RowStep
from foredraft.core.traits import DrafterTraits
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.growth import RANK_ACCEPTANCE, PlannedGrowth, planned_parents
from foredraft.drafters.guide import best_first
from foredraft.drafters.heads.base import HeadModule, HeadOption
from foredraft.drafters.heads.layers import RMSNorm, head_weights
from foredraft.drafters.heads.rows import OutputRows
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.trained import HEAD_OPTION, trained_head
from foredraft.models.base import HeadTarget, ModelShape, offered


class _Head(nn.Module):
    """A residual block and a projection [E, E]; the identity at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.block = nn.Linear(hidden_size, hidden_size)
        self.projection = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.projection(x + F.silu(self.block(x)))
        return projected


class MedusaModule(HeadModule):
    """See the module docstring.

    Args:
        num_heads: H, the most tokens it can draft.
    """

    kind = "medusa"
    training_file = "foredraft.train.heads.medusa"
    OPTIONS: ClassVar = {
        "num_heads": HeadOption("heads, and so the most tokens on a path of a draft (4)", 4),
    }

    def __init__(self, shape: ModelShape, num_rows: int | None, num_heads: int) -> None:
        last = shape.num_hidden_layers - 1
        super().__init__(shape, (last,), num_rows=num_rows, num_heads=num_heads)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        heads = [_Head(shape.hidden_size) for _ in range(num_heads)]
        self.heads = nn.ModuleList(heads)
        self.output_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def projected(self, hidden: Tensor, count: int) -> Tensor:
        """Outputs of the first heads for the last layer's output [..., E], before the norm.

        Returns:
            [..., H, E] for ``count`` heads, or as many as there are.
        """
        normed = self.norm(hidden.to(self.output.dtype))
        return torch.stack([head(normed) for head in self.heads[:count]], -2)


class MedusaDrafter(BaseDrafter):
    """See the module docstring.

    A head does not know the others' tokens, so all nodes of a depth have the same children, and
    a node's chance is the product of those on its path: the tree takes the best ones, as many as
    are worth their price. Drawn requests get a tree whose shape is fixed before anything is drawn.

    Args:
        width: children looked at for each node; 1 makes chains.
    """

    def __init__(self, module: MedusaModule, target: HeadTarget, width: int = 4) -> None:
        parts = target.parts
        weights = head_weights([], module.output_norm, module.output, module.shape)
        self._rows_runner = target.head_runner(weights)
        self._module = module.to(parts.device, parts.dtype).eval()
        self._rows = OutputRows(module.output_ids_R, target.vocab_size)
        self._width = width if target.capabilities.tree_attention else 1
        self.taps, self.traits = module.taps, DrafterTraits(promise=module.promise)
        self._last: dict[int, tuple[int, Tensor]] = {}  # where a request stands, and its state [E]

    def observe(self, observations: Sequence[RowStep]) -> None:
        (layer,) = self.taps
        for seen in observations:
            if layer in seen.taps:
                # A copy: the view would keep the states of the whole forward.
                self._last[seen.request_id] = seen.end, seen.hidden(layer)[-1].clone()

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        ready = [row for row in rows if self._knows(row)]
        if not ready:
            return [NOT_READY] * len(rows)
        states_NE = torch.stack([self._last[row.request_id][1] for row in ready])
        logits_NHR = self._logits(states_NE, max(row.budget for row in rows))
        asked = zip(ready, logits_NHR, strict=True)
        drafts = {row.request_id: self._draft(row, logits_HR) for row, logits_HR in asked}
        return [drafts.get(row.request_id, NOT_READY) for row in rows]

    def end(self, request_id: int) -> None:
        self._last.pop(request_id, None)

    def _knows(self, row: DraftRow) -> bool:
        """Whether it has the state that the row's last token was drawn from.

        Not so before the prompt is read, and after steps that were not to draft.
        """
        end, _ = self._last.get(row.request_id, (-1, None))
        return row.budget > 0 and end == len(row.tokens) - 1

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


def _build(context: DrafterContext) -> MedusaDrafter:
    width = checked_int("width", context.options.get("width", 4), 1)
    module = trained_head(context, MedusaModule)
    return MedusaDrafter(module, offered(context.target.capabilities.cache_layers), width)


DRAFTER = DrafterSpec(
    build=_build,
    summary="trained heads on the last hidden state guess several later tokens at once",
    options={**HEAD_OPTION, "width": "tokens looked at for each place; 1 drafts chains (4)"},
    num_draft_tokens=8,
    needs=("parts", "cache_layers"),
    trained=MedusaModule.kind,
    head=MedusaModule,
)
