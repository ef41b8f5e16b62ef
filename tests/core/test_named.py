"""Laws over some tokens give what the same laws over all tokens give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from foredraft.core import named
from foredraft.core.choices import SharedChoices
from foredraft.core.named import NamedLaws, NamedTokens
from foredraft.core.noise import gumbel_top

VOCAB = 1000


def laws_of(random: np.random.Generator, num_rows: int, num_others: int) -> NamedLaws:
    ids_R = np.sort(random.permutation(VOCAB)[:num_rows])
    without = np.setdiff1d(np.arange(VOCAB), ids_R)
    logits_NR = random.normal(0.0, 3.0, (3, num_rows)).astype(np.float32)
    logits_NR[random.random((3, num_rows)) < 0.1] = -math.inf
    logits_NR[:, 0] = 1.0
    others = [
        [(int(token), float(random.normal(2.0, 2.0))) for token in without[:count]]
        for count in (0, num_others, 1)
    ]
    return NamedLaws(NamedTokens(ids_R, VOCAB), logits_NR, 1.25, others)


def dense(laws: NamedLaws, place: int) -> np.ndarray[Any, Any]:
    logits_V = np.full(VOCAB, -math.inf)
    logits_V[laws.tokens.ids_R] = laws.logits_NR[place]
    for token, logit in laws.others[place]:
        logits_V[token] = logit
    return logits_V


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("num_rows", [1, 7, 255, 256, 600, 990])
def test_the_same_tokens_as_over_the_whole_vocabulary(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    for seed in range(20):
        laws = laws_of(random, num_rows, num_others=3)
        found = laws.top(16, seed, [5, 6, 2**40])
        for place, position in enumerate((5, 6, 2**40)):
            expected = gumbel_top(dense(laws, place), 16, seed, position, laws.scale)
            assert [token for token, _ in found[place]] == [token for token, _ in expected]
            sums = [score for _, score in expected]
            # A dense row holds what joins it in the dtype of the rows.
            assert [score for _, score in found[place]] == pytest.approx(sums, abs=1e-5)


def test_every_token_may_have_a_row() -> None:
    random = np.random.default_rng(0)
    logits_NR = random.normal(0.0, 3.0, (2, VOCAB)).astype(np.float32)
    laws = NamedLaws(NamedTokens(np.arange(VOCAB), VOCAB), logits_NR, 1.0, [[], [(3, 20.0)]])
    for place, scored in enumerate(laws.top(4, 9, [1, 2])):
        assert scored == gumbel_top(laws.law(place).logits_V, 4, 9, 1 + place)


@pytest.mark.usefixtures("path")
def test_what_is_not_finite_is_refused() -> None:
    logits_NR = np.array([[1.0, 2.0], [1.0, math.nan]], dtype=np.float32)
    laws = NamedLaws(NamedTokens(np.array([4, 9]), VOCAB), logits_NR, 1.0, [[], []])
    with pytest.raises(ValueError, match="not finite"):
        laws.top(2, 1, [1, 2])


@pytest.mark.parametrize(
    "new", [lambda: SharedChoices(3, 7, 0.8), lambda: SharedChoices(None, 0, 0.0)]
)
def test_each_is_chosen_as_if_alone(new: Callable[[], Any]) -> None:
    laws, choices = laws_of(np.random.default_rng(1), 300, num_others=2), new()
    found = choices.best_each(laws, [0, 1, 2], 3, 0.7)
    for place, depth in enumerate((0, 1, 2)):
        alone = choices.best(laws.law(place), depth, 3, 0.7)
        assert [choice.token for choice in found[place]] == [choice.token for choice in alone]


def test_rows_of_tokens() -> None:
    tokens = NamedTokens(np.array([4, 9, 700]), VOCAB)
    assert [tokens.row(token) for token in (4, 9, 700, 0, 5, 999)] == [0, 1, 2, None, None, None]
    assert named.NamedTokens(np.arange(3), 3).are_all
