"""Keyed choices: what a number is keyed by, and that probabilities are honoured."""

from __future__ import annotations

import math

import torch

from foredraft.core.choices import KeyedDrawnChoices, KeyedVerifyChoices
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
        ahead = KeyedVerifyChoices(9, 20).draw_target(uniform, depth)
        assert ahead == KeyedVerifyChoices(9, 20 + depth).draw_target(uniform, 0)


def test_other_draws_are_keyed_by_the_step() -> None:
    uniform = torch.ones(1000)
    steps = range(40)
    assert len({KeyedDrawnChoices(9, n).draw(uniform, 0) for n in steps}) > 30
    assert len({KeyedDrawnChoices(9, 0).draw(uniform, n) for n in steps}) > 30
    assert len({KeyedVerifyChoices(9, n).draw_residual(uniform) for n in steps}) > 30


def test_accept_honours_its_probability() -> None:
    for probability in (0.03, 0.5, 0.9):
        hits = sum(KeyedVerifyChoices(s, 3).accept(probability, 1) for s in range(COUNT))
        assert within_five_errors(hits, probability)


def test_certainties() -> None:
    for seed in range(200):
        choices = KeyedVerifyChoices(seed, 3)
        assert choices.accept(1.0, 0)
        assert not choices.accept(0.0, 0)


def test_draws_honour_their_probabilities() -> None:
    draws = {
        "draft": [KeyedDrawnChoices(s, 3).draw(PROBS, 0) for s in range(COUNT)],
        "target": [
            KeyedVerifyChoices(s, 3).draw_target(Law.of_probs(PROBS), 0) for s in range(COUNT)
        ],
        "residual": [KeyedVerifyChoices(s, 3).draw_residual(PROBS) for s in range(COUNT)],
    }
    for name, tokens in draws.items():
        for token, probability in enumerate(PROBS.tolist()):
            assert within_five_errors(tokens.count(token), probability), (name, token)
