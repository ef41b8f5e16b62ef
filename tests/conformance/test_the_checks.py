"""The checks would notice: drafters that break one rule each fail the check for that rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.models.base import ScoreRow, Target
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


class NeverRewinds(BaseDrafter):
    """Drafts with a model and leaves the cache entries of rejected tokens where they are."""

    def __init__(self, model: Target) -> None:
        self._model = model
        self._slots: dict[int, int] = {}

    def begin(self, row: DraftRow) -> None:
        self._slots[row.request_id] = self._model.cache.allocate()

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [Proposal.chosen(TokenTree.chain(self._draft(row))) for row in rows]

    def _draft(self, row: DraftRow) -> list[int]:
        slot, cache = self._slots[row.request_id], self._model.cache
        pending = row.tokens[cache.length(slot) :] or row.tokens[-1:]
        draft: list[int] = []
        while len(draft) < row.budget:
            (scores,) = self._model.score([ScoreRow(slot, pending)])
            cache.keep(slot, len(pending), ())
            draft.append(int(scores.logits_NV[0].argmax()))
            pending = draft[-1:]
        return draft

    def end(self, request_id: int) -> None:
        self._model.cache.free(self._slots.pop(request_id))


def leaky_drafts(new_drafter: Callable[[], Drafter]) -> None:
    check_rejections_leave_nothing(new_drafter, KIND.new_target(), PROMPT, PARAMS, 3)


def test_a_drafter_that_keeps_rejected_tokens_is_found() -> None:
    with pytest.raises(AssertionError, match="another draft after"):
        leaky_drafts(RemembersRejected)


def test_a_draft_model_that_keeps_rejected_cache_entries_is_found() -> None:
    with pytest.raises(AssertionError, match="another draft after"):
        leaky_drafts(lambda: NeverRewinds(KIND.new_draft_model()))


def test_leaky_drafters_are_exact_all_the_same() -> None:
    """A leak costs acceptance, never the text: which is why it needs a check of its own."""
    target = KIND.new_target()
    expected = plain(target, [PROMPT], PARAMS)[0]
    for drafter in (RemembersRejected(), NeverRewinds(KIND.new_draft_model())):
        assert run(target, drafter, [PROMPT], PARAMS, 3)[0].token_ids == expected


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
