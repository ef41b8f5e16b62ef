"""Chosen and drawn drafts: one cannot end as the other."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import foredraft
from foredraft.core.choices import (
    DrawnChoices,
    KeyedDrawnChoices,
    KeyedSharedChoices,
    LikeliestChoices,
    SharedChoices,
)
from foredraft.core.draft import ChosenDraft, DrawnDraft
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import DrawnProposal, DrawnProposalBuilder, Proposal
from foredraft.core.rules import SamplingRules
from foredraft.core.tree import ROOT
from foredraft.drafters.base import DraftRow

RULES = SamplingRules(SamplingParams(temperature=1.0))
LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4])
SHARED = [KeyedSharedChoices(3, 0, 1.0), LikeliestChoices()]


def verbs(choices: type) -> set[str]:
    return {name for name in vars(choices) if not name.startswith("_")}


def test_the_two_kinds_of_choices_have_no_verb_in_common() -> None:
    assert not verbs(SharedChoices) & verbs(DrawnChoices)
    assert not verbs(KeyedSharedChoices) & verbs(DrawnChoices)
    assert not verbs(KeyedDrawnChoices) & verbs(SharedChoices)
    assert not any(isinstance(choices, DrawnChoices) for choices in SHARED)


def test_each_draft_asks_for_its_own_kind() -> None:
    assert get_type_hints(ChosenDraft.__init__)["choices"] is SharedChoices
    assert get_type_hints(DrawnDraft.__init__)["choices"] is DrawnChoices
    assert get_type_hints(DrawnProposalBuilder.__init__)["choices"] is DrawnChoices


@pytest.mark.parametrize("choices", SHARED)
def test_the_noise_of_the_target_draws_nothing(choices: SharedChoices) -> None:
    with pytest.raises(AttributeError):
        DrawnDraft(RULES, (1,), choices).extend(ROOT, LOGITS)  # type: ignore[arg-type]


def test_the_numbers_of_drawn_drafts_choose_nothing() -> None:
    with pytest.raises(AttributeError):
        ChosenDraft(RULES, (1,), KeyedDrawnChoices(3, 0)).extend(  # type: ignore[arg-type]
            ROOT, LOGITS
        )


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
