"""Drafters in stages: the draft model's own draft from fewer forwards of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.model.cascade import VerticalCascade
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.base import Capabilities, ScoreRow, Scores, Target
from foredraft.models.table import TableModel
from tests.conformance.harness import KINDS, Letters, is_empty, plain, run, table_kind
from tests.engine.helpers import ScriptedDrafter, counting_model

KIND = table_kind()
PROMPTS = ([3, 1, 4, 1, 5], [2], [0, 1, 2, 0, 1, 2, 0, 1], [5, 5, 3])


class Scripted(ScriptedDrafter):
    """Drafts by a script, after a draft as well as after the text."""

    traits = DrafterTraits(continues=True)

    def __init__(self, script: Callable[[DraftRow], Proposal]) -> None:
        super().__init__(script)
        self._next = script

    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal:
        return self._next(replace(row, tokens=(*row.tokens, *draft)))


def counting(right: int, vocab_size: int = 10) -> Scripted:
    """Drafts the next numbers, of which the first ``right`` are what follows."""

    def draft(row: DraftRow) -> Proposal:
        last = row.tokens[-1]
        numbers = [(last + i + (i > right)) % vocab_size for i in range(1, row.budget + 1)]
        return Proposal.chosen(TokenTree.chain(numbers))

    return Scripted(draft)


def silent() -> Scripted:
    return Scripted(lambda row: Proposal.chosen(TokenTree()))


def row(tokens: Sequence[int], budget: int, **params: Any) -> DraftRow:
    return DraftRow.of(0, tuple(tokens), SamplingParams(**params), budget, seed=5)


def vertical(model: Target, *guessers: Drafter) -> VerticalCascade:
    return VerticalCascade(guessers, model)


class Watched(TableModel):
    """Counts upwards, and keeps what it was asked to read."""

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        super().__init__(10, counting_model().probs)
        self.capabilities = capabilities or self.capabilities
        self.read: list[ScoreRow] = []

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        self.read += rows
        return super().score(rows, taps)


def build(options: dict[str, Any], target: Target, draft_model: Target | None) -> Drafter:
    return build_drafter("cascade", DrafterContext(target, draft_model, options))


@pytest.mark.parametrize("coupling", ["seeded", "drawn"])
@pytest.mark.parametrize("right", [0, 1, 3, 9])
def test_the_draft_is_the_draft_models_own(right: int, coupling: str) -> None:
    """The same tokens, from the same distributions, whatever was guessed."""
    text = [4, 5, 6]
    for step in range(6):
        at = row(text, 7, temperature=1.0, coupling=coupling)
        alone, cascade = (
            DraftModelDrafter(counting_model()),
            vertical(counting_model(), counting(right)),
        )
        for drafter in (alone, cascade):
            drafter.begin(DraftRow.of(0, text))
        (expected,), (actual,) = alone.propose([at]), cascade.propose([at])
        assert actual.tree == expected.tree
        if coupling == "drawn":
            assert actual.draft_probs_NV is not None
            assert expected.draft_probs_NV is not None
            assert torch.equal(actual.draft_probs_NV, expected.draft_probs_NV)
        text = [*text, actual.tree.tokens[0], step]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_guessed_tree_does_not_end_a_draft(temperature: float) -> None:
    """Where a forward of the draft model draws, it does so along a chain alone."""
    kind = KINDS["native-fused-bf16"]()
    alone = DraftModelDrafter(kind.new_draft_model())
    alone.begin(DraftRow.of(0, [3, 1, 4]))
    at = row([3, 1, 4], 6, temperature=temperature)
    (expected,) = alone.propose([at])
    first = expected.tree.tokens[0]
    tree = TokenTree((first ^ 1, first, expected.tree.tokens[1]), (ROOT, ROOT, 1))
    cascade = vertical(kind.new_draft_model(), ScriptedDrafter(lambda row: Proposal.chosen(tree)))
    cascade.begin(DraftRow.of(0, [3, 1, 4]))
    (proposal,) = cascade.propose([at])
    assert proposal.tree == expected.tree
    assert len(proposal.tree) == 6


def test_right_guesses_save_forwards() -> None:
    for right, num_forwards in ((9, 1), (3, 2), (1, 4), (0, 8)):
        model = Watched()
        cascade = vertical(model, counting(right))
        cascade.begin(DraftRow.of(0, [4]))
        (proposal,) = cascade.propose([row([4], 8)])
        assert proposal.tree == TokenTree.chain([5, 6, 7, 8, 9, 0, 1, 2])
        assert len(model.read) == num_forwards


def test_a_guesser_that_cannot_go_on_is_asked_once() -> None:
    guesser = ScriptedDrafter(lambda row: Proposal.chosen(TokenTree.chain([5, 6, 0])))
    model = Watched()
    cascade = vertical(model, guesser)
    cascade.begin(DraftRow.of(0, [4]))
    cascade.propose([row([4], 8)])
    assert [len(read.tree) for read in model.read] == [
        3,
        0,
        0,
        0,
        0,
        0,
    ]  # three tokens, then one each


def test_the_next_guesser_is_asked_when_one_is_silent() -> None:
    model = Watched()
    cascade = vertical(model, silent(), counting(9))
    cascade.begin(DraftRow.of(0, [4]))
    cascade.propose([row([4], 8)])
    assert [len(read.tree) for read in model.read] == [7]


def test_a_guessed_tree_is_cut_to_a_branch_without_tree_attention() -> None:
    tree = TokenTree((9, 5, 6, 7), (ROOT, ROOT, 1, 2))
    for tree_attention in (True, False):
        model = Watched(Capabilities(tree_attention=tree_attention))
        cascade = vertical(model, ScriptedDrafter(lambda row: Proposal.chosen(tree)))
        cascade.begin(DraftRow.of(0, [4]))
        (proposal,) = cascade.propose([row([4], 5)])
        assert proposal.tree == TokenTree.chain([5, 6, 7, 8, 9])
        assert len(model.read[0].tree) == (4 if tree_attention else 3)


def test_tokens_that_the_target_lacks_are_not_drafted() -> None:
    """Models of one tokenizer have rows for ids that it never gives, more or fewer of them."""
    codec, target = Letters(), TableModel.random(7, seed=1)
    codec.fingerprint = "one of both"  # type: ignore[assignment]
    context = DrafterContext(
        target, TableModel(10, counting_model().probs), {}, tokenizer=codec, draft_tokenizer=codec
    )
    cascade = build_drafter("cascade", context)
    cascade.begin(DraftRow.of(0, [4]))
    (proposal,) = cascade.propose([row([4], 8)])
    assert proposal.tree.tokens[:2] == (5, 6)
    assert max(proposal.tree.tokens) < 7


def test_no_room_in_the_draft_models_context_means_no_draft() -> None:
    model = TableModel(10, counting_model().probs, max_context=8)
    cascade = vertical(model, counting(9))
    cascade.begin(DraftRow.of(0, [1]))
    for length, expected in ((4, 4), (5, 0)):
        (proposal,) = cascade.propose([row(range(length), 4)])
        assert len(proposal.tree) == expected
        assert (proposal is NOT_READY) == (expected == 0), "it counts as not asked"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": "ngram,draft_modle"}, "did you mean 'draft_model'"),
        ({"stages": "draft_model"}, "two or more"),
        ({"stages": "ngram,cascade"}, "'cascade' cannot be a stage"),
        ({"stages": "ngram,ngram,draft_model"}, "'ngram' cannot be a stage"),
        ({"stages": "ngram,suffix"}, "the last one 'draft_model'"),
        ({"stages": "draft_model,ngram"}, "the last one 'draft_model'"),
        ({"mode": "vertical"}, "mode"),
        ({"stage": "ngram"}, "did you mean 'stages'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(options, KIND.new_target(), KIND.new_draft_model())


class Reluctant(ScriptedDrafter):
    """Cannot begin."""

    def begin(self, row: DraftRow) -> None:
        raise ValueError("not today")

    def end(self, request_id: int) -> None:
        raise ValueError("not today either")


@pytest.mark.parametrize("first", [True, False])
def test_a_stage_that_cannot_begin_leaves_nothing_of_the_others(first: bool) -> None:
    """Each of the others has a slot by then, or has none to give back."""
    target, model, other = (KIND.new_target() for _ in range(3))
    reluctant = Reluctant(lambda row: Proposal.chosen(TokenTree()))
    drafting = DraftModelDrafter(model)
    stages = [reluctant, drafting] if first else [drafting, reluctant]
    params = SamplingParams(max_tokens=5)
    results = run(target, vertical(other, *stages), PROMPTS, params, 4)
    assert [r.token_ids for r in results] == plain(target, PROMPTS, params)
    assert all(is_empty(each.cache) for each in (target, model, other))


def test_a_stage_that_cannot_end_leaves_nothing_of_the_others() -> None:
    target, model = KIND.new_target(), KIND.new_target()
    reluctant = Reluctant(lambda row: Proposal.chosen(TokenTree()))
    reluctant.begin = lambda request: None  # type: ignore[method-assign]
    cascade = vertical(model, reluctant, DraftModelDrafter(model))
    run(target, cascade, PROMPTS, SamplingParams(max_tokens=5), 4)
    assert is_empty(model.cache)
