"""Proposals: the distribution recorded is the distribution drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from foredraft.core.choices import DrawnChoices
from foredraft.core.errors import MalformedProposalError
from foredraft.core.proposal import NO_PROPOSAL, Draft, Proposal, Renaming
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree


@dataclass
class Scripted:
    """Draws given tokens, and records its calls."""

    tokens: list[int]
    asked: list[tuple[list[float], int]] = field(default_factory=list)

    def draw(self, probs_V: Tensor, index: int) -> int:
        self.asked.append((probs_V.tolist(), index))
        return self.tokens[index]


HALF = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
OTHER = torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64)


def test_a_chosen_proposal_has_no_distribution() -> None:
    proposal = Proposal.chosen(TokenTree.chain([1, 2]))
    assert not proposal.is_drawn
    assert not NO_PROPOSAL.is_drawn
    assert NO_PROPOSAL.tree == EMPTY_TREE


def test_a_builder_that_drew_nothing_proposes_nothing() -> None:
    assert Draft(Scripted([]), replacement=True).build() is NO_PROPOSAL


def test_a_drawn_chain() -> None:
    choices = Scripted([2, 0])
    builder = Draft(choices, replacement=True)
    assert builder.draw(ROOT, HALF) == 0
    assert builder.draw(0, OTHER) == 1
    assert [builder.tokens[node] for node in (0, 1)] == [2, 0]
    proposal = builder.build()
    assert proposal.is_drawn
    assert proposal.tree == TokenTree.chain([2, 0])
    assert proposal.draft_probs_NV is not None
    assert torch.equal(proposal.draft_probs_NV, torch.stack([HALF, OTHER]))
    assert choices.asked == [(HALF.tolist(), 0), (OTHER.tolist(), 1)]


def test_siblings_with_replacement_are_drawn_from_the_same() -> None:
    choices = Scripted([0, 0])
    builder = Draft(choices, replacement=True)
    builder.draw(ROOT, HALF)
    builder.draw(ROOT, HALF)
    assert choices.asked == [(HALF.tolist(), 0), (HALF.tolist(), 1)]
    assert builder.build().replacement
    assert builder.build().tree.tokens == (0, 0)


def test_siblings_without_replacement_leave_the_distribution() -> None:
    choices = Scripted([0, 2, 1, 0])
    builder = Draft(choices, replacement=False)
    for _ in range(2):
        builder.draw(ROOT, HALF)
    assert builder.draw(1, HALF) == 2, "a child of another parent starts afresh"
    builder.draw(ROOT, HALF)
    assert [asked for asked, _ in choices.asked] == [
        [0.5, 0.3, 0.2],
        [0.0, 0.3, 0.2],
        [0.5, 0.3, 0.2],
        [0.0, 0.3, 0.0],
    ]
    proposal = builder.build()
    assert not proposal.replacement
    assert proposal.draft_probs_NV is not None
    assert all(torch.equal(row, HALF) for row in proposal.draft_probs_NV), "q before removal"


def test_an_exhausted_support_draws_nothing() -> None:
    two = torch.tensor([0.5, 0.0, 0.5])
    builder = Draft(DrawnChoices(1, 0), replacement=False)
    assert [builder.draw(ROOT, two) for _ in range(4)] == [0, 1, None, None]
    assert sorted(builder.build().tree.tokens) == [0, 2]


def test_siblings_must_share_their_distribution() -> None:
    builder = Draft(Scripted([0, 1]), replacement=True)
    builder.draw(ROOT, HALF)
    with pytest.raises(MalformedProposalError, match="siblings"):
        builder.draw(ROOT, OTHER)


def test_a_reused_buffer_does_not_change_what_was_recorded() -> None:
    """Drafters write each step's probabilities into one buffer; the record must not follow."""
    buffer = HALF.clone()
    builder = Draft(Scripted([0, 1]), replacement=True)
    builder.draw(ROOT, buffer)
    buffer.copy_(OTHER)
    builder.draw(0, buffer)
    proposal = builder.build()
    assert proposal.draft_probs_NV is not None
    assert torch.equal(proposal.draft_probs_NV, torch.stack([HALF, OTHER]))


def test_drawing_leaves_the_distribution_as_it_was() -> None:
    probs_V = HALF.clone()
    builder = Draft(DrawnChoices(1, 0), replacement=False)
    for _ in range(3):
        builder.draw(ROOT, probs_V)
    assert torch.equal(probs_V, HALF)


def test_a_drawn_node_needs_an_earlier_parent() -> None:
    builder = Draft(Scripted([0]), replacement=True)
    builder.draw(3, HALF)
    with pytest.raises(MalformedProposalError, match="parent 3"):
        builder.build()


def test_renaming_keeps_shape_probabilities_and_replacement() -> None:
    builder = Draft(Scripted([2, 0]), replacement=False)
    for _ in range(2):
        builder.draw(ROOT, torch.tensor([0.25, 0.0, 0.75]))
    renamed = builder.build().renamed(Renaming({0: 3, 2: 1}, vocab_size=5))
    assert renamed.tree == TokenTree((1, 3), (ROOT, ROOT))
    assert not renamed.replacement
    assert renamed.draft_probs_NV is not None
    assert renamed.draft_probs_NV.tolist() == [[0.0, 0.75, 0.0, 0.25, 0.0]] * 2


def test_a_chosen_draft_can_be_renamed() -> None:
    renamed = Proposal.chosen(TokenTree.chain([0, 2])).renamed(Renaming({0: 3, 2: 1}, 5))
    assert renamed == Proposal.chosen(TokenTree.chain([3, 1]))


def test_a_renaming_is_one_to_one_and_complete() -> None:
    with pytest.raises(MalformedProposalError, match="renamed to one"):
        Renaming({0: 1, 2: 1}, 5)
    with pytest.raises(MalformedProposalError, match="draft token 2 has no new name"):
        Proposal.chosen(TokenTree.chain([0, 2])).renamed(Renaming({0: 1}, 5))
