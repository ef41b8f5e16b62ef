"""Keyed choices: what a number is keyed by, and that probabilities are honoured."""

from __future__ import annotations

import math

import torch

from foredraft.core.choices import (
    Choice,
    DrawKey,
    DrawnChoices,
    SharedChoices,
    chance_alike,
)
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


def test_certainties() -> None:
    for seed in range(200):
        choices = DrawKey(seed, 3)
        assert choices.accept(1.0, 0)
        assert not choices.accept(0.0, 0)


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
