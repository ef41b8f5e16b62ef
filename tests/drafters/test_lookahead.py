"""Lookahead: the comb of guesses, how the window moves, and what enters the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import ROOT
from foredraft.drafters import build_drafter
from foredraft.drafters.base import DraftRow
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.text.lookahead import (
    JacobiWindow,
    LookaheadDrafter,
    LookaheadSizes,
)
from foredraft.models.base import ScoreRow
from foredraft.models.table import TableModel
from tests.conformance.harness import plain, run
from tests.engine.helpers import counting_model


def row(tokens: Sequence[int], budget: int) -> DraftRow:
    return DraftRow.of(0, tuple(tokens), SamplingParams(), budget)


class Steps:
    """A drafter that is driven step by step, with a target that scores what it proposes."""

    def __init__(self, sizes: LookaheadSizes, target: TableModel, prompt: Sequence[int]) -> None:
        self.drafter, self.target, self.tokens = LookaheadDrafter(sizes), target, list(prompt)
        self.drafter.begin(DraftRow.of(0, prompt))

    def step(self, budget: int, committed: Sequence[int]) -> Proposal:
        (proposal,) = self.drafter.propose([row(self.tokens, budget)])
        slot = self.target.cache.allocate()
        (scores,) = self.target.score([ScoreRow(slot, self.tokens, proposal.tree)])
        self.target.cache.free(slot)
        seen = RowStep(
            *(0, 0, 1),
            proposal=proposal,
            committed=tuple(committed),
            logits_NV=scores.logits_NV,
        )
        self.drafter.observe([seen])
        self.tokens += committed
        return proposal


def test_the_window_is_a_comb() -> None:
    sizes = LookaheadSizes(window=3, ngram_size=4, guesses=2)
    steps = Steps(sizes, counting_model(), [5])
    for _ in range(3):
        proposal = steps.step(sizes.num_nodes, [5])
    tree = proposal.tree
    num_guessed = len(tree) - 9
    comb = [p - num_guessed if p != ROOT else ROOT for p in tree.parents[num_guessed:]]
    assert comb == [ROOT, 0, 1, 0, 1, 2, 3, 4, 5]
    assert len(tree) <= sizes.num_nodes


def test_each_row_is_what_the_target_said_after_the_one_above() -> None:
    sizes = LookaheadSizes(window=3, ngram_size=3, guesses=1)
    target = counting_model()  # the next token is one more
    steps = Steps(sizes, target, [7, 2])
    first = steps.step(3, [3]).tree
    assert len(first) == 3, "one row until the target has said something"
    second = steps.step(6, [4]).tree
    row_0, row_1 = second.tokens[-6:-3], second.tokens[-3:]
    # The window moved on by one committed token, so columns 1 and 2 are now 0 and 1.
    assert row_0[:2] == first.tokens[1:]
    assert row_1[:2] == tuple((token + 1) % 10 for token in first.tokens[1:])
    third = steps.step(6, [5]).tree
    assert third.tokens[-6:-3] == row_1, "the first row is gone, the next one takes its place"
    assert third.tokens[-3:] == tuple((token + 1) % 10 for token in row_1)


@pytest.mark.parametrize("num_committed", [1, 2, 3, 5])
def test_guesses_keep_their_positions(num_committed: int) -> None:
    """Rows hold position + 100 * age: every token stays at the position it was a guess for."""
    sizes = LookaheadSizes(window=4, ngram_size=4, guesses=1)
    window = JacobiWindow(sizes, filler=[-1])
    window.rows = [[r + c for c in range(4)] for r in range(3)]
    window.advance(num_committed, outputs=[3 + c for c in range(4)])
    for r, tokens in enumerate(window.rows):
        for c, token in enumerate(tokens):
            assert token in (-1, r + c + num_committed)
    kept = sum(token != -1 for tokens in window.rows for token in tokens)
    assert kept == 3 * max(0, 4 - (num_committed - 1))


def test_guesses_come_from_the_pool_and_share_nodes() -> None:
    sizes = LookaheadSizes(window=1, ngram_size=3, guesses=3)
    steps = Steps(sizes, counting_model(), [1, 2, 3, 1, 2, 4, 1, 5, 6, 1])
    tree = steps.step(sizes.num_nodes, [2]).tree
    assert tree.tokens[:5] == (5, 6, 2, 4, 3)
    assert tree.parents[:5] == (ROOT, 0, ROOT, 2, 2)


def test_it_learns_what_was_never_in_the_text() -> None:
    """The prompt holds no n-gram of the reply: the first can only come from the window."""
    target = counting_model()
    prompt = [9, 7, 5, 3, 1, 8, 6, 4, 2, 0]
    params = SamplingParams(temperature=0.0, max_tokens=9)
    drafter = LookaheadDrafter(LookaheadSizes(window=6, ngram_size=3, guesses=2))
    (expected,) = plain(target, [prompt], params)
    (result,) = run(target, drafter, [prompt], params, 16)
    assert result.token_ids == expected == tuple(range(1, 10))
    assert result.stats.steps < 9


@pytest.mark.parametrize(
    "options", [{"ngram_size": 1}, {"window": 0}, {"guesses": "many"}, {"windw": 3}]
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_drafter("lookahead", DrafterContext(TableModel.random(4, seed=1), options=options))
