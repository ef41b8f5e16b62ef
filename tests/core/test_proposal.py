"""Proposals: the distribution recorded is the distribution drawn from."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft.core.choices import DrawnChoices, SharedChoices
from foredraft.core.errors import MalformedProposalError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Draft, DrawnProposal, Proposal, Renaming
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow


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


# --------------------------------------------- chosen and drawn drafts: one cannot end as the other


RULES = SamplingParams(temperature=1.0)
LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4])
SHARED = [SharedChoices(3, 0, 1.0), SharedChoices(None, 0, 0.0)]


def verbs(choices: type) -> set[str]:
    return {name for name in vars(choices) if not name.startswith("_")}


def test_the_two_kinds_of_choices_have_no_verb_in_common() -> None:
    assert not verbs(SharedChoices) & verbs(DrawnChoices)
    assert not any(isinstance(choices, DrawnChoices) for choices in SHARED)


@pytest.mark.parametrize("choices", SHARED)
def test_the_noise_of_the_target_draws_nothing(choices: SharedChoices) -> None:
    with pytest.raises(AssertionError, match="draws nothing"):
        Draft(choices, RULES, (1,)).draw(ROOT, LOGITS.softmax(0))
    assert not Draft(choices, RULES, (1,)).build().is_drawn


def test_a_draft_is_chosen_or_drawn() -> None:
    draft = Draft(DrawnChoices(3, 0), RULES, (1,))
    draft.extend(ROOT, LOGITS)
    draft.take(0, 2)
    with pytest.raises(MalformedProposalError, match="chosen or drawn"):
        draft.build()


@pytest.mark.parametrize(("coupling", "kind"), [("seeded", Proposal), ("drawn", DrawnProposal)])
def test_what_a_row_drafts_is_of_its_coupling(coupling: str, kind: type[Proposal]) -> None:
    params = SamplingParams.of(temperature=1.0, coupling=coupling)
    draft = DraftRow.of(0, (1, 2), params, 3, seed=5).draft()
    draft.extend(ROOT, LOGITS, 2)
    assert type(draft.build()) is kind


def test_drawn_proposals_are_made_in_one_file_only() -> None:
    root = Path(inspect.getfile(foredraft)).parent
    makers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DrawnProposal"
    }
    assert makers == {"core/proposal.py"}
