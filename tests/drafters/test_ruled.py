"""The wrapper that knows the rules: forced tokens in front, impossible ones out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.rules.base import TextlessRules
from foredraft.core.sampling import Law, law_of
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRow, Observation, learns
from foredraft.drafters.common.ruled import RuledDrafter


@dataclass
class Rules(TextlessRules):
    """Forces what it is told, and bans token 9 everywhere and 3 behind 2."""

    chain: tuple[int, ...] = ()
    bans = True
    takes_best = False

    def law(self, logits_V: torch.Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
        return law_of(logits_V, SamplingParams())

    def permits(self, token: int, text: Sequence[int], drafted: Sequence[int] = ()) -> bool:
        return token != 9 and not (token == 3 and drafted and drafted[-1] == 2)

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        return self.chain


@dataclass
class Inner(BaseDrafter):
    """Proposes one tree, and remembers that it was asked."""

    tree: TokenTree
    asked: list[int] = field(default_factory=list)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.asked += [row.request_id for row in rows]
        return [Proposal.chosen(self.tree) for _ in rows]


class Continuing(Inner):
    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal:
        self.asked.append(row.budget)
        return Proposal.chosen(self.tree)


def row(request_id: int = 0, chain: tuple[int, ...] = (), budget: int = 6) -> DraftRow:
    return DraftRow.of(request_id, (1, 2), SamplingParams(), budget, rules=Rules(chain))


TREE = TokenTree((2, 3, 4, 9, 5, 6), (ROOT, 0, 0, ROOT, 3, 2))


def test_what_cannot_come_is_not_scored() -> None:
    (proposal,) = RuledDrafter(Inner(TREE)).propose([row()])
    assert proposal.tree == TokenTree((2, 4, 6), (ROOT, 0, 1))


def test_a_draft_that_may_come_is_left_as_it_is() -> None:
    inner = Inner(TokenTree.chain((2, 4)))
    (proposal,) = RuledDrafter(inner).propose([row()])
    assert proposal.tree is inner.tree


@pytest.mark.parametrize(
    ("chain", "tree", "expected", "asked"),
    [
        ((7, 8), TREE, (7, 8), []),  # known without asking
        ((7,), TokenTree(), (7,), [0]),  # for nothing, where the drafter has none
        ((7,), TokenTree.chain((7, 4)), (7, 4), [0]),
        ((), TokenTree.chain((4,)), (4,), [0]),
        ((1, 2, 4, 5, 6, 7, 8), TREE, (1, 2, 4, 5, 6, 7), []),  # no more than the budget
    ],
)
def test_forced_tokens(
    chain: tuple[int, ...], tree: TokenTree, expected: tuple[int, ...], asked: list[int]
) -> None:
    inner = Inner(tree)
    (proposal,) = RuledDrafter(inner).propose([row(chain=chain)])
    assert proposal.tree.tokens == expected
    assert inner.asked == asked


def test_who_can_goes_on_behind_them() -> None:
    inner = Continuing(TREE)
    (proposal,) = RuledDrafter(inner).propose([row(chain=(7, 2))])
    assert inner.asked == [4]
    assert proposal.tree == TokenTree((7, 2, 2, 4, 6), (ROOT, 0, 1, 2, 3))


def test_rows_keep_their_own() -> None:
    rows = [row(0, (7, 8)), row(1), row(2, (5, 6))]
    drafts = RuledDrafter(Inner(TokenTree.chain((4,)))).propose(rows)
    assert [draft.tree.tokens for draft in drafts] == [(7, 8), (4,), (5, 6)]


def test_without_a_budget_nothing_is_forced() -> None:
    (proposal,) = RuledDrafter(Inner(TokenTree())).propose([row(chain=(7, 8), budget=0)])
    assert not proposal.tree


def test_it_hides_nothing_of_who_is_inside() -> None:
    """An engine spares drafters that learn nothing the observations, and asks for taps anew."""
    inner = Inner(TREE)
    wrapped = RuledDrafter(inner)
    assert not learns(wrapped)
    inner.taps = (3,)
    assert wrapped.taps == (3,)
    assert learns(RuledDrafter(Learning(TREE)))


class Learning(Inner):
    def observe(self, observations: Sequence[Observation]) -> None:
        pass
