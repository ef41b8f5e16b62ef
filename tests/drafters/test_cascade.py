"""Drafters in stages: the draft model's own draft from fewer forwards of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.models.base import Capabilities, ScoreRow, Scores, Target
from foredraft.models.table import TableModel
from tests.conformance.harness import Letters, is_empty, plain, run, table_kind
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


def row(tokens: Sequence[int], budget: int, **params: Any) -> DraftRow:
    return DraftRow.of(0, tuple(tokens), SamplingParams(**params), budget, seed=5)


def cascade_of(model: Target, guesser: Scripted) -> DraftModelDrafter:
    return DraftModelDrafter(model, guesser=guesser)


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
        alone = DraftModelDrafter(counting_model())
        cascade = cascade_of(counting_model(), counting(right))
        for drafter in (alone, cascade):
            drafter.begin(DraftRow.of(0, text))
        (expected,), (actual,) = alone.propose([at]), cascade.propose([at])
        assert actual.tree == expected.tree
        if coupling == "drawn":
            assert actual.draft_probs_NV is not None
            assert expected.draft_probs_NV is not None
            assert torch.equal(actual.draft_probs_NV, expected.draft_probs_NV)
        text = [*text, actual.tree.tokens[0], step]


def test_right_guesses_save_forwards() -> None:
    for right, num_forwards in ((9, 2), (3, 2), (1, 4), (0, 8)):
        model = Watched()
        cascade = cascade_of(model, counting(right))
        cascade.begin(DraftRow.of(0, [4]))
        (proposal,) = cascade.propose([row([4], 8)])
        assert proposal.tree == TokenTree.chain([5, 6, 7, 8, 9, 0, 1, 2])
        assert len(model.read) == num_forwards


def test_a_guessed_tree_is_cut_to_its_longest_branch() -> None:
    tree, model = TokenTree((9, 5, 6), (ROOT, ROOT, 1)), Watched()
    cascade = cascade_of(model, Scripted(lambda row: Proposal.chosen(tree)))
    cascade.begin(DraftRow.of(0, [4]))
    (proposal,) = cascade.propose([row([4], 5)])
    assert proposal.tree.tokens[:3] == (5, 6, 7)
    assert model.read[0].tree == TokenTree.chain([5, 6])


def test_tokens_that_the_target_lacks_are_not_drafted() -> None:
    """Models of one tokenizer have rows for ids that it never gives, more or fewer of them."""
    codec, target = Letters(), TableModel.random(7, seed=1)
    codec.fingerprint = "one of both"  # type: ignore[assignment]
    model = TableModel(10, counting_model().probs)
    context = DrafterContext(target, model, tokenizer=codec, draft_tokenizer=codec, is_fixed=True)
    cascade = build_drafter("cascade", context)
    cascade.begin(DraftRow.of(0, [4]))
    (proposal,) = cascade.propose([row([4], 8)])
    assert proposal.tree.tokens[:2] == (5, 6)
    assert max(proposal.tree.tokens) < 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guesser": "ngramm"}, "did you mean 'ngram'"),
        ({"guesser": "lookahead"}, "cannot go on from a draft"),
        ({"guessers": "ngram"}, "did you mean 'guesser'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(options, KIND.new_target(), KIND.new_draft_model())


class Reluctant(Scripted):
    """Cannot begin."""

    def begin(self, row: DraftRow) -> None:
        raise ValueError("not today")

    def end(self, request_id: int) -> None:
        raise ValueError("not today either")


def test_a_guesser_that_cannot_begin_or_end_leaves_nothing_of_the_model() -> None:
    target, model = KIND.new_target(), KIND.new_target()
    params = SamplingParams(max_tokens=5)
    reluctant = Reluctant(lambda row: Proposal.chosen(TokenTree()))
    results = run(target, cascade_of(model, reluctant), PROMPTS, params, 4)
    assert [r.token_ids for r in results] == plain(target, PROMPTS, params)
    assert is_empty(target.cache)
    assert is_empty(model.cache)
