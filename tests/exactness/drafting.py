"""Ways to draft from a table: chosen or drawn, every shape, with and without replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foredraft.core.choices import DrawnChoices
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Draft as Builder
from foredraft.core.proposal import Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.models.table import TableModel
from tests.exactness.worlds import Distributions, Tokens

Conditional = Callable[[Tokens], Tensor]


class Draft(Protocol):
    """Makes a proposal for the text ``context`` of at most ``budget`` nodes."""

    def __call__(
        self, context: Tokens, probs: Conditional, choices: DrawnChoices, budget: int
    ) -> Proposal: ...


SHAPES: dict[str, tuple[int, ...]] = {
    "nothing": (),
    "chain of 1": (ROOT,),
    "chain of 2": (ROOT, 0),
    "chain of 3": (ROOT, 0, 1),
    "star of 2": (ROOT, ROOT),
    "star of 3": (ROOT, ROOT, ROOT),
    "fork below a chain": (ROOT, 0, 0),
    "unbalanced": (ROOT, ROOT, 0, 2),
    "unbalanced, late": (ROOT, ROOT, 1, 2),
    "siblings far apart": (ROOT, 0, ROOT, 0),
    "binary of depth 2": (ROOT, ROOT, 0, 0, 1, 1),
}
"""Parent arrays by name."""


@dataclass(frozen=True)
class Chosen:
    """The tree whose siblings are the most likely tokens, most likely first.

    Where siblings outnumber the vocabulary, tokens repeat.
    """

    parents: tuple[int, ...]

    def __call__(
        self, context: Tokens, probs: Conditional, choices: DrawnChoices, budget: int
    ) -> Proposal:
        parents = self.parents[:budget]
        tokens: list[int] = []
        for node, parent in enumerate(parents):
            ranked = probs(_text(context, parents, tokens, parent)).argsort(descending=True)
            rank = parents[:node].count(parent)
            tokens.append(int(ranked[rank % len(ranked)]))
        return Proposal.chosen(TokenTree(tuple(tokens), parents))


@dataclass(frozen=True)
class Drawn:
    """The tree whose every node is drawn by the shipped builder."""

    parents: tuple[int, ...]
    replacement: bool = True

    def __call__(
        self, context: Tokens, probs: Conditional, choices: DrawnChoices, budget: int
    ) -> Proposal:
        builder = Builder(choices, replacement=self.replacement)
        built: dict[int, int | None] = {ROOT: ROOT}
        texts: dict[int, Tokens] = {ROOT: context}
        for node, parent in enumerate(self.parents[:budget]):
            above = built[parent]
            built[node] = None if above is None else builder.draw(above, probs(texts[parent]))
            drawn = built[node]
            if drawn is not None:
                texts[node] = (*texts[parent], builder.tokens[drawn])
        return builder.build()


@dataclass(frozen=True)
class Stopping:
    """A drawn chain that ends by itself.

    Attributes:
        unlikely: it ends with a token that its draft model finds less likely than this.
        flat: it ends before a position where no token is as likely as this.
    """

    num_draft_tokens: int
    unlikely: float = 0.0
    flat: float = 0.0

    def __call__(
        self, context: Tokens, probs: Conditional, choices: DrawnChoices, budget: int
    ) -> Proposal:
        builder = Builder(choices, replacement=True)
        parent = ROOT
        for _ in range(min(self.num_draft_tokens, budget)):
            probs_V = probs(context)
            if float(probs_V.max()) < self.flat:
                break
            node = builder.draw(parent, probs_V)
            assert node is not None
            token = builder.tokens[node]
            if float(probs_V[token]) < self.unlikely:
                break
            parent, context = node, (*context, token)
        return builder.build()


def _text(context: Tokens, parents: Sequence[int], tokens: Sequence[int], node: int) -> Tokens:
    path: list[int] = []
    while node != ROOT:
        path.append(tokens[node])
        node = parents[node]
    return (*context, *reversed(path))


class TableDrafter(BaseDrafter):
    """A drafter for the engine around any way to draft.

    Args:
        model: the tables to draft from.
        draft: how.
        params: the distribution to draft from; the request's own without it.
    """

    def __init__(
        self, model: TableModel, draft: Draft, params: SamplingParams | None = None
    ) -> None:
        self._model, self._draft, self._params = model, draft, params
        self._probs: dict[tuple[float, ...], Distributions] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [
            self._draft(tuple(row.tokens), self._probs_for(row.params), row.choices, row.budget)
            for row in rows
        ]

    def _probs_for(self, asked: SamplingParams) -> Distributions:
        params = self._params or asked
        key = (params.temperature, params.top_k, params.top_p, params.min_p)
        if key not in self._probs:
            self._probs[key] = Distributions(self._model, params)
        return self._probs[key]
