"""A smaller model drafts: how it reads, rewinds and shares its forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foredraft.core.errors import CapabilityError, ConfigError, VocabularyMismatchError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.base import DraftRow
from foredraft.drafters.growth import GrowthLimits, planned_parents
from foredraft.drafters.model.draft_model import DraftModelDrafter, DraftTreeDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.base import Capabilities, ScoreRow, Scores
from foredraft.models.table import TableModel
from tests.core.reference import logits_to_probs
from tests.drafters.prices import FREE_NODES


class Watched(TableModel):
    """Notes how many pending tokens and tree nodes each row of each forward brings."""

    def __init__(self, like: TableModel) -> None:
        super().__init__(like.vocab_size, like.probs)
        self.reads: list[list[int]] = []
        self.nodes: list[list[int]] = []

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        self.reads.append([len(row.pending) for row in rows])
        self.nodes.append([len(row.tree) for row in rows])
        return super().score(rows, taps)


def row(
    tokens: Sequence[int], budget: int, request_id: int = 0, params: SamplingParams | None = None
) -> DraftRow:
    params = params or SamplingParams()
    return DraftRow.of(request_id, tuple(tokens), params, budget, seed=5, prices=FREE_NODES)


@pytest.fixture
def model() -> Watched:
    return Watched(TableModel.random(8, seed=3))


def likeliest(model: TableModel, tokens: Sequence[int], count: int) -> tuple[int, ...]:
    text = tuple(tokens)
    for _ in range(count):
        probs = model.probs(text)
        text = (*text, max(range(len(probs)), key=probs.__getitem__))
    return text[len(tokens) :]


def test_a_chain_that_is_doubted_ends_and_a_sure_one_goes_on() -> None:
    """Behind token 0 eight tokens are equally likely; behind each of them one is all but sure."""

    def probs(text: tuple[int, ...]) -> list[float]:
        if text[-1] == 0:
            return [0.125] * 8
        return [0.9993 if token == text[-1] else 0.0001 for token in range(8)]

    model, params = TableModel(8, probs), SamplingParams(temperature=0.0)
    drafter, free = DraftModelDrafter(model, stops=True), (1.0, 1.0)
    for tokens, count in (([1, 0], 1), ([0, 1], 6)):
        drafter.begin(DraftRow.of(count, tokens))
        (proposal,) = drafter.propose([replace(row(tokens, 6, count, params), prices=free)])
        assert len(proposal.tree) == count
    drafter.begin(DraftRow.of(8, [0, 1]))  # a forward that has become as dear as a step
    dear = replace(row([0, 1], 6, 8, params), prices=free, token_share=1.0)
    assert len(drafter.propose([dear])[0].tree) == 1
    drafter.begin(DraftRow.of(9, [1, 0]))  # drawn: nothing is known of the chance
    drawn = replace(params, temperature=1.0, coupling="drawn")
    (proposal,) = drafter.propose([row([1, 0], 3, 9, drawn)])
    assert len(proposal.tree) == 3


def test_reads_only_what_is_new_and_takes_back_what_was_rejected(model: Watched) -> None:
    drafter = DraftModelDrafter(model)
    drafter.begin(DraftRow.of(0, [1, 2]))
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
        drafter.begin(DraftRow.of(request_id, [request_id]))
    rows = [row([0], 3, 0), row([1, 4, 2], 1, 1), row([2], 2, 2)]
    proposals = drafter.propose(rows)
    assert model.reads == [[1, 3, 1], [1, 1], [1]]
    assert [p.tree.tokens for p in proposals] == [
        likeliest(model, each.tokens, each.budget) for each in rows
    ]


def test_drawn_tokens_come_with_the_distribution_they_were_drawn_from(model: Watched) -> None:
    params = SamplingParams(temperature=0.7, top_k=4, coupling="drawn")
    drafter = DraftModelDrafter(model)
    drafter.begin(DraftRow.of(0, [1, 2]))
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
    drafter.begin(DraftRow.of(0, [1]))
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


# ------------------------------------------------------------------------------------- trees

LIMITS = GrowthLimits(max_depth=3, width=2, branching=2, round_cost=0.0)


def test_a_tree_is_grown_round_by_round(model: Watched) -> None:
    drafter = DraftTreeDrafter(model, LIMITS)
    drafter.begin(DraftRow.of(0, [1, 2]))
    (proposal,) = drafter.propose([row([1, 2], 10)])
    assert model.reads == [[2], *[[1]] * 4]
    assert model.nodes == [[0], [2], [4], [6], [8]]
    tree = proposal.tree
    assert len(tree) == 10
    assert tree.max_depth == 3
    for path in tree.paths:
        text = (1, 2, *(tree.tokens[node] for node in path))
        most = 6 if len(text) == 3 else 2
        likely = sorted(range(8), key=lambda token: -model.probs(text[:-1])[token])[:most]
        assert text[-1] in likely


def test_entries_of_the_accepted_path_are_kept(model: Watched) -> None:
    drafter = DraftTreeDrafter(model, LIMITS)
    drafter.begin(DraftRow.of(0, [1, 2]))
    (first,) = drafter.propose([row([1, 2], 10)])
    model.reads.clear()
    path = next(path for path in first.tree.paths if len(path) == 3)
    accepted = [1, 2, *(first.tree.tokens[node] for node in path), 0]
    (second,) = drafter.propose([row(accepted, 1)])
    assert model.reads[0] == [2], "the leaf, which was never scored, and the next token"
    assert second.tree.tokens[:1] == likeliest(model, accepted, 1)
    assert model.cache.context(0) == tuple(accepted)


def test_a_drawn_tree_is_planned(model: Watched) -> None:
    drafter = DraftTreeDrafter(model, LIMITS)
    drafter.begin(DraftRow.of(0, [1, 2]))
    drawn = SamplingParams(temperature=1.0, coupling="drawn")
    (proposal,) = drafter.propose([row([1, 2], 6, params=drawn)])
    assert proposal.is_drawn
    assert proposal.tree.parents == planned_parents((0.6, 0.15), 6, 3)


def build(**options: Any) -> object:
    model = TableModel.random(8, seed=3)
    return build_drafter("draft-model", DrafterContext(model, TableModel.random(8, 4), options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "best-frist"}, "did you mean 'best-first'"),
        ({"shape": "chain", "width": 4}, "width is of no use with shape 'chain'"),
        ({"shape": "best-first", "guesses": False}, "guesses is of no use with shape 'best-first'"),
        ({"shape": "best-first", "width": 0}, "width is 0"),
        ({"shape": "best-first", "round_cost": "quick"}, "round_cost must be a finite number"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_a_tree_needs_tree_attention_on_both_sides() -> None:
    for blind in (0, 1):
        models = [TableModel.random(8, seed=3), TableModel.random(8, seed=4)]
        models[blind].capabilities = Capabilities()
        context = DrafterContext(models[0], models[1], {"shape": "best-first"})
        with pytest.raises(CapabilityError, match="use shape 'chain'"):
            build_drafter("draft-model", context)
