"""A smaller model drafts: how it reads, rewinds and shares its forwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foredraft.core.choices import KeyedDraftChoices
from foredraft.core.errors import ConfigError, VocabularyMismatchError
from foredraft.core.sampling import SamplingParams, logits_to_probs
from foredraft.drafters import build_drafter
from foredraft.drafters.base import DrafterContext, DraftRow
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.models.base import RowScores, ScoreRow
from foredraft.models.table import TableModel


class Watched(TableModel):
    """Notes how many tokens each row of each forward brings."""

    def __init__(self, like: TableModel) -> None:
        super().__init__(like.vocab_size, like.probs)
        self.reads: list[list[int]] = []

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> list[RowScores]:
        self.reads.append([len(row.pending) for row in rows])
        return super().score(rows, taps)


def row(
    tokens: Sequence[int], budget: int, request_id: int = 0, params: SamplingParams | None = None
) -> DraftRow:
    choices = KeyedDraftChoices(5, len(tokens))
    return DraftRow(request_id, tuple(tokens), params or SamplingParams(), budget, choices)


@pytest.fixture
def model() -> Watched:
    return Watched(TableModel.random(8, seed=3))


def likeliest(model: TableModel, tokens: Sequence[int], count: int) -> tuple[int, ...]:
    text = tuple(tokens)
    for _ in range(count):
        probs = model.probs(text)
        text = (*text, max(range(len(probs)), key=probs.__getitem__))
    return text[len(tokens) :]


def test_drafts_its_most_likely_tokens(model: Watched) -> None:
    drafter = DraftModelDrafter(model)
    drafter.begin(0, [1, 2])
    (proposal,) = drafter.propose([row([1, 2], 4)])
    assert proposal.tree.tokens == likeliest(model, [1, 2], 4)
    assert not proposal.is_drawn


def test_reads_only_what_is_new_and_takes_back_what_was_rejected(model: Watched) -> None:
    drafter = DraftModelDrafter(model)
    drafter.begin(0, [1, 2])
    (first,) = drafter.propose([row([1, 2], 3)])
    assert model.reads == [[2], [1], [1]]
    model.reads.clear()
    accepted_two = [1, 2, *first.tree.tokens[:2], (first.tree.tokens[2] + 1) % 8]
    (second,) = drafter.propose([row(accepted_two, 2)])
    assert model.reads == [[1], [1]]
    assert second.tree.tokens == likeliest(model, accepted_two, 2)
    model.reads.clear()
    accepted_all = [*accepted_two, *second.tree.tokens, 0]
    (third,) = drafter.propose([row(accepted_all, 2)])
    assert model.reads[0] == [2]  # the last draft token, which it never read, and the bonus
    assert third.tree.tokens == likeliest(model, accepted_all, 2)


def test_rows_share_each_forward_while_they_draft(model: Watched) -> None:
    drafter = DraftModelDrafter(model)
    for request_id in range(3):
        drafter.begin(request_id, [request_id])
    rows = [row([0], 3, 0), row([1, 4, 2], 1, 1), row([2], 2, 2)]
    proposals = drafter.propose(rows)
    assert model.reads == [[1, 3, 1], [1, 1], [1]]
    assert [p.tree.tokens for p in proposals] == [
        likeliest(model, each.tokens, each.budget) for each in rows
    ]


def test_drawn_tokens_come_with_the_distribution_they_were_drawn_from(model: Watched) -> None:
    params = SamplingParams(temperature=0.7, top_k=4, coupling="drawn")
    drafter = DraftModelDrafter(model)
    drafter.begin(0, [1, 2])
    (proposal,) = drafter.propose([row([1, 2], 3, params=params)])
    assert proposal.draft_probs_NV is not None
    text: tuple[int, ...] = (1, 2)
    for node, token in enumerate(proposal.tree.tokens):
        slot = model.cache.allocate()
        logits_V = model.score([ScoreRow(slot, text)])[0].logits_NV[0]
        expected_V = logits_to_probs(logits_V, params)
        assert expected_V.equal(proposal.draft_probs_NV[node])
        assert float(expected_V[token]) > 0
        text = (*text, token)


def test_drafts_nothing_where_its_own_context_ends(model: Watched) -> None:
    model.max_context = 6
    drafter = DraftModelDrafter(model)
    drafter.begin(0, [1])
    assert len(drafter.propose([row([1, 2, 3], 3)])[0].tree) == 3
    assert len(drafter.propose([row([1, 2, 3, 4], 3)])[0].tree) == 0


def test_refuses_a_model_that_cannot_draft_for_the_target(model: Watched) -> None:
    other = TableModel.random(9, seed=3)
    with pytest.raises(VocabularyMismatchError, match="has 9 tokens and the target 8"):
        build_drafter("draft-model", DrafterContext(model, other))
    with pytest.raises(ConfigError, match="is the target itself"):
        build_drafter("draft-model", DrafterContext(model, model))
    with pytest.raises(ConfigError, match="needs a draft model"):
        build_drafter("draft-model", DrafterContext(model))
