"""Verification: which rule takes which proposal, and what each decides when told how it ends.

That the rules keep the target's distribution is shown in tests/exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from foredraft.core.choices import DrawKey, DrawnChoices
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Draft, Proposal
from foredraft.core.sampling import Law, NodeLaws, law_of
from foredraft.core.tree import ROOT, TokenTree
from foredraft.core.verify import Verdict, verify, verify_block, verify_traversal
from tests.exactness.reference_rules import verify_recursive, verify_token_rule

Rule = Callable[[Proposal, NodeLaws, DrawKey], Verdict]
RULES = [verify_token_rule, verify_block, verify_recursive, verify_traversal]


@dataclass
class Scripted:
    """Decides as told, and remembers what it was asked.

    Attributes:
        accepts: the decisions, in order.
        tokens: what to draw, in order.
        probabilities: what `accept` was asked.
        indices: the decision numbers.
        drawn_from: what tokens were drawn from, normalised.
    """

    accepts: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    drawn_from: list[list[float]] = field(default_factory=list)

    def draw_target(self, law: Law, depth: int) -> int:
        self.indices.append(depth)
        return self._draw(law.probs_V)

    def accept(self, probability: float, index: int) -> bool:
        self.probabilities.append(probability)
        self.indices.append(index)
        return self.accepts.pop(0)

    def draw_residual(self, probs_V: Tensor) -> int:
        return self._draw(probs_V)

    def _draw(self, probs_V: Tensor) -> int:
        self.drawn_from.append((probs_V / probs_V.sum()).tolist())
        return self.tokens.pop(0)


@dataclass
class Told(DrawnChoices):
    """A draft stream that draws given tokens."""

    tokens: Sequence[int]

    def draw(self, probs_V: Tensor, index: int) -> int:
        return self.tokens[index]


def rows(*probs: Sequence[float]) -> NodeLaws:
    """Target laws after the root and after each node."""
    return {i - 1: law_with(row) for i, row in enumerate(probs)}.__getitem__


def law_with(probs: Sequence[float]) -> Law:
    return Law.of_probs(torch.tensor(probs, dtype=torch.float64))


def drawn(
    tokens: Sequence[int],
    parents: Sequence[int],
    draft_probs: Sequence[Sequence[float]],
    replacement: bool = True,
) -> Proposal:
    builder = Draft(Told(tokens), replacement=replacement)
    for parent, row in zip(parents, draft_probs, strict=True):
        builder.draw(parent, torch.tensor(row, dtype=torch.float64))
    return builder.build()


P, Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
FLAT = [1 / 3] * 3


def test_nothing_drafted_draws_from_the_target() -> None:
    choices = Scripted(tokens=[2])
    assert verify(NO_PROPOSAL, rows(P), choices) == Verdict((), 2, "bonus")
    assert choices.drawn_from == [pytest.approx(P)]


def test_a_chosen_tree_follows_what_the_target_draws() -> None:
    #  root ─ 0:token 1 ─ 2:token 0
    #       └ 1:token 2 ─ 3:token 2
    proposal = Proposal.chosen(TokenTree((1, 2, 0, 2), (ROOT, ROOT, 0, 1)))
    target = rows(P, Q, P, Q, FLAT)
    choices = Scripted(tokens=[2, 2, 0])
    assert verify(proposal, target, choices) == Verdict((1, 3), 0, "bonus")
    assert choices.indices == [0, 1, 2], "depths, so that plain decoding draws the same"
    assert verify(proposal, target, Scripted(tokens=[1, 1])) == Verdict((0,), 1, "correction")
    assert verify(proposal, target, Scripted(tokens=[0])) == Verdict((), 0, "correction")


def test_the_rule_follows_from_the_proposal() -> None:
    chain = drawn([0, 1], [ROOT, 0], [Q, Q])
    star = drawn([0, 1], [ROOT, ROOT], [Q, Q])
    block = Scripted([True], [0])
    verify(chain, rows(P, P, P), block)
    assert block.indices == [2], "block verification decides from the longest prefix down"
    traversal = Scripted([False, True], [0])
    assert verify(star, rows(P, P, P), traversal) == Verdict((1,), 0, "bonus")
    assert traversal.indices == [1, 2], "one decision a leaf, and none for the root"


def test_block_verification_by_hand() -> None:
    proposal = drawn([2, 0], [ROOT, 0], [Q, Q])
    target = rows(P, P, FLAT)
    # Weights: 1, then 0.2/0.6 = 1/3, then min(1, 1/3 * 0.5/0.2) = 5/6.
    whole = Scripted([True], [1])
    assert verify_block(proposal, target, whole) == Verdict((0, 1), 1, "bonus")
    assert whole.probabilities == pytest.approx([5 / 6])
    assert whole.drawn_from == [pytest.approx(FLAT)]
    # Nothing of P/3 exceeds Q, so stopping after one token has no probability.
    none = Scripted([False, False], [0])
    assert verify_block(proposal, target, none) == Verdict((), 0, "correction")
    assert none.probabilities == pytest.approx([5 / 6, 0.0])
    assert none.drawn_from == [pytest.approx([0.75, 0.25, 0.0])], "the residual of P and Q"


def test_traversal_judges_the_deepest_node_first() -> None:
    #  root ─ 0:token 2 ─ 2:token 0
    #       └ 1:token 0
    proposal = drawn([2, 0, 0], [ROOT, ROOT, 0], [Q, Q, Q])
    target = rows(P, P, Q, FLAT)
    # Weights: 0.2/0.6 = 1/3 for node 0, then min(1, 1/3 * 0.5/0.2) = 5/6 for node 2. Nothing of
    # P/3 exceeds Q, so node 0 alone has none; the root's second child starts from (P - Q)+.
    choices = Scripted([False, False, True], [1])
    assert verify_traversal(proposal, target, choices) == Verdict((1,), 1, "bonus")
    assert choices.indices == [3, 1, 2]
    assert choices.probabilities == pytest.approx([5 / 6, 0.0, 1.0])
    assert choices.drawn_from == [pytest.approx(Q)]
    whole = Scripted([True], [2])
    assert verify_traversal(proposal, target, whole) == Verdict((0, 2), 2, "bonus")
    assert whole.drawn_from == [pytest.approx(FLAT)]


def test_traversal_without_replacement_takes_the_rejected_token_out_of_the_draft() -> None:
    proposal = drawn([2, 0], [ROOT, ROOT], [Q, Q], replacement=False)
    choices = Scripted([False, False], [1])
    verify_traversal(proposal, rows(P, P, P), choices)
    assert choices.drawn_from == [pytest.approx([1.0, 0.0, 0.0])], "(0.75, 0.25, 0) - (0.5, 0.5, 0)"


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_is_the_target_is_never_rejected(rule: Rule) -> None:
    """Also in float32, where the probabilities sum to one only roughly."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        logits_NV = torch.randn(4, 1000, generator=generator)
        params = SamplingParams(temperature=1.0)
        laws = {i - 1: law_of(logits_V, params) for i, logits_V in enumerate(logits_NV)}
        builder = Draft(Told([1, 2, 3]), replacement=True)
        for parent in range(-1, 2):
            builder.draw(parent, laws[parent].probs_V)
        choices = Scripted([True] * 3, [0])
        assert rule(builder.build(), laws.__getitem__, choices).num_accepted == 3
        assert choices.probabilities == pytest.approx([1.0] * len(choices.probabilities))


def test_only_what_is_visited_is_computed() -> None:
    """The distribution asked for costs a pass over the vocabulary, so unvisited nodes have none."""

    visited: list[int] = []

    def counted(node: int) -> Law:
        visited.append(node)
        return law_with(FLAT)

    proposal = Proposal.chosen(TokenTree((1, 2, 0, 2), (ROOT, ROOT, 0, 1)))
    choices: DrawKey = Scripted(tokens=[2, 0])
    verify(proposal, counted, choices)
    assert visited == [ROOT, 1]
