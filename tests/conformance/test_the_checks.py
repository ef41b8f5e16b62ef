"""The checks would notice: drafters that break one rule each fail the check for that rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.models.base import Target
from tests.conformance.harness import (
    Setup,
    check_budget,
    check_forgets,
    check_rejections_leave_nothing,
    plain,
    run,
    table_kind,
)
from tests.engine.helpers import ScriptedDrafter

PROMPT = [0, 1, 2, 0, 1, 2, 0, 1]
PARAMS = SamplingParams(temperature=1.0, seed=17, max_tokens=24)
KIND = table_kind()


class RemembersRejected(NgramDrafter):
    """Takes its own rejected tokens for text."""

    def __init__(self) -> None:
        super().__init__(min_ngram_size=1)
        self._rejected: dict[int, list[int]] = {}

    def begin(self, row: DraftRow) -> None:
        super().begin(row)
        self._rejected[row.request_id] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        proposals = super().propose(rows)
        for i, row in enumerate(rows):
            if self._rejected[row.request_id] and row.budget:
                proposals[i] = Proposal.chosen(TokenTree.chain(self._rejected[row.request_id][:1]))
        return proposals

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            tokens = seen.proposal.tree.tokens
            self._rejected[seen.request_id] = list(tokens[seen.num_accepted :])


def test_a_drafter_that_keeps_rejected_tokens_is_found() -> None:
    with pytest.raises(AssertionError, match="another draft after"):
        check_rejections_leave_nothing(RemembersRejected, KIND.new_target(), PROMPT, PARAMS, 3)


def test_leaky_drafters_are_exact_all_the_same() -> None:
    """A leak costs acceptance, never the text: which is why it needs a check of its own."""
    target = KIND.new_target()
    (result,) = run(target, RemembersRejected(), [PROMPT], PARAMS, 3)
    assert result.token_ids == plain(target, [PROMPT], PARAMS)[0]


class KeepsRequests(NgramDrafter):
    def end(self, request_id: int) -> None:
        pass


class KeepsSlots(DraftModelDrafter):
    def __init__(self, model: Target) -> None:
        super().__init__(model)
        self._slots_of_model = model.cache

    def begin(self, row: DraftRow) -> None:
        super().begin(row)
        self._slots_of_model.allocate()  # and it is never freed


def test_a_request_that_is_not_forgotten_is_found() -> None:
    setup = Setup(KIND.new_target(), KeepsRequests(), None)
    with pytest.raises(AssertionError, match="a request is left over"):
        check_forgets(setup, [PROMPT, [1]], PARAMS, 3)


def test_a_slot_that_is_not_freed_is_found() -> None:
    draft_model = KIND.new_draft_model()
    setup = Setup(KIND.new_target(), KeepsSlots(draft_model), draft_model)
    with pytest.raises(AssertionError, match="a slot of the draft model"):
        check_forgets(setup, [PROMPT, [1]], PARAMS, 3)


@pytest.mark.parametrize("more", [1, 7])
def test_a_drafter_over_its_budget_is_found(more: int) -> None:
    over = ScriptedDrafter(lambda row: Proposal.chosen(TokenTree.chain([1] * (row.budget + more))))
    with pytest.raises(AssertionError):
        check_budget(over, KIND.new_target(), [PROMPT], PARAMS)


def test_a_drafter_that_drafts_unasked_is_found() -> None:
    unasked = ScriptedDrafter(
        lambda row: Proposal.chosen(TokenTree.chain([1] * max(row.budget, 1)))
    )
    with pytest.raises(AssertionError):
        check_budget(unasked, KIND.new_target(), [PROMPT], PARAMS)
