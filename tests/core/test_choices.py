"""Keyed choices: what keys a number, that probabilities are honoured, and laws over some tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.core.choices import (
    Choice,
    DrawKey,
    DrawnChoices,
    SharedChoices,
    chance_alike,
)
from foredraft.core.named import NamedLaws, NamedTokens
from foredraft.core.noise import gumbel_top
from foredraft.core.sampling import Law

PROBS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
COUNT = 4000


def within_five_errors(hits: int, probability: float) -> bool:
    error = math.sqrt(probability * (1 - probability) / COUNT)
    return abs(hits / COUNT - probability) < 5 * error


def test_a_target_draw_is_keyed_by_absolute_position() -> None:
    """Plain decoding reaches the position in another step, and must draw the same token there."""
    uniform = Law.of_probs(torch.ones(1000))
    for depth in range(5):
        ahead = DrawKey(9, 20).draw_target(uniform, depth)
        assert ahead == DrawKey(9, 20 + depth).draw_target(uniform, 0)


def test_other_draws_are_keyed_by_the_step() -> None:
    uniform = torch.ones(1000)
    steps = range(40)
    assert len({DrawnChoices(9, n).draw(uniform, 0) for n in steps}) > 30
    assert len({DrawnChoices(9, 0).draw(uniform, n) for n in steps}) > 30
    assert len({DrawKey(9, n).draw_residual(uniform) for n in steps}) > 30


def test_accept_honours_its_probability() -> None:
    for probability in (0.03, 0.5, 0.9):
        hits = sum(DrawKey(s, 3).accept(probability, 1) for s in range(COUNT))
        assert within_five_errors(hits, probability)


def test_draws_honour_their_probabilities() -> None:
    draws = {
        "draft": [DrawnChoices(s, 3).draw(PROBS, 0) for s in range(COUNT)],
        "target": [DrawKey(s, 3).draw_target(Law.of_probs(PROBS), 0) for s in range(COUNT)],
        "residual": [DrawKey(s, 3).draw_residual(PROBS) for s in range(COUNT)],
    }
    for name, tokens in draws.items():
        for token, probability in enumerate(PROBS.tolist()):
            assert within_five_errors(tokens.count(token), probability), (name, token)


def log_loss(chance: float, came: bool) -> float:
    return -math.log(chance if came else 1.0 - chance)


def test_noise_makes_the_chances_of_copies_better() -> None:
    """Its token is nearly sure in some places and nearly impossible in others: no place is the
    average one, and taking it for that makes the chances worse than no noise does.
    """
    shares = (0.95, 0.6, 0.5, 0.3, 0.2, 0.2, 0.1, 0.1, 0.04, 0.01)
    laws = [Law.of_probs(torch.tensor([0.5 * (1 - p), 0.5 * (1 - p), p])) for p in shares]
    named = Choice(2, sum(shares) / len(shares))
    without = weighed = total = 0.0
    for seed in range(COUNT):
        came = DrawKey(seed, 7).draw_target(laws[seed % 10], 1) == named.token
        ((token, chance),) = SharedChoices(seed, 7, 1.0).weigh([named], 1)
        assert token == named.token
        without += log_loss(named.chance, came)
        weighed += log_loss(chance, came)
        total += chance
    assert weighed < without
    assert abs(total / COUNT - named.chance) < 0.02


def test_weighing_names_each_candidate_once_and_the_likeliest_first() -> None:
    candidates = [Choice(5, 0.4), Choice(6, 0.3), Choice(9, 0.0)]
    for seed in range(50):
        found = SharedChoices(seed, 7, 0.7).weigh(candidates, 2)
        chances = [choice.chance for choice in found]
        assert sorted(choice.token for choice in found) == [5, 6, 9]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) < 1.0


def test_what_noise_cannot_change_stays() -> None:
    sure, none = [Choice(3, 1.0)], [Choice(3, 0.0), Choice(4, 0.0)]
    assert SharedChoices(1, 7, 1.0).weigh(sure, 0) == sure
    assert SharedChoices(1, 7, 1.0).weigh(none, 0) == none
    assert SharedChoices(1, 7, 0.0).weigh([Choice(3, 0.4)], 0) == [Choice(3, 0.4)]


def test_the_chance_of_an_equal_draw_is_known_before_it() -> None:
    """Of a model whose logits are ours and a little noise, at temperatures 0 and 1."""
    noise = torch.Generator().manual_seed(0)
    for scale in (0.0, 1.0):
        sure, unsure = list[bool](), list[bool]()
        for position in range(400):
            ours_V = 2.0 * torch.randn(500, generator=noise)
            theirs_V = ours_V + 0.5 * torch.randn(500, generator=noise)
            key, choices = DrawKey(3, position, scale), SharedChoices(3, position, scale)
            chance = chance_alike(ours_V, key)
            alike = len(
                {choices.best(_law(each, scale), 0)[0].token for each in (ours_V, theirs_V)}
            )
            (sure if chance > 0.6 else unsure).append(alike == 1)
        assert sum(sure) / len(sure) > 0.95
        assert sum(unsure) / len(unsure) < 0.75


def _law(logits_V: torch.Tensor, scale: float) -> Law:
    law = Law.of_probs(logits_V.double().softmax(0))
    return law if scale else Law.of_probs((logits_V == logits_V.max()).double())


# ------------------------------- laws over some tokens give what the same laws over all tokens give


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
