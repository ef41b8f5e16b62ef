"""Chosen and drawn drafts: one cannot end as the other."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

import foredraft
from foredraft.core.choices import DrawnChoices, SharedChoices
from foredraft.core.errors import MalformedProposalError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Draft, DrawnProposal, Proposal
from foredraft.core.tree import ROOT
from foredraft.drafters.base import DraftRow

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


def test_what_the_numbers_of_drawn_drafts_append_is_drawn() -> None:
    draft = Draft(DrawnChoices(3, 0), RULES, (1,))
    draft.extend(ROOT, LOGITS, 2)
    assert draft.draw_key(ROOT) is None
    built = draft.build()
    assert isinstance(built, DrawnProposal)
    assert len(built.draft_probs_NV) == len(built.tree) == 2


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
