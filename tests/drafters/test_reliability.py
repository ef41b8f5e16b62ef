"""Chances that are corrected by how they have held."""

from __future__ import annotations

import random

import pytest

from foredraft.core.choices import Choice
from foredraft.drafters.heads.steps import Reliability


@pytest.mark.parametrize(("claimed", "true"), [(0.9, 0.45), (0.5, 0.5), (0.9, 0.0), (0.1, 0.9)])
def test_the_factor_follows_what_comes(claimed: float, true: float) -> None:
    reliability, draw = Reliability(), random.Random(0)
    assert reliability.factor == 1.0
    for _ in range(600):
        reliability.record([Choice(1, claimed)], 1 if draw.random() < true else 2)
    assert reliability.factor == pytest.approx(min(1.2, max(0.3, true / claimed)), abs=0.08)


def test_tokens_and_their_order_stay() -> None:
    reliability = Reliability()
    for _ in range(50):
        reliability.record([Choice(1, 0.9)], 1)
    corrected = reliability.corrected([Choice(5, 0.95), Choice(6, 0.02)])
    assert [choice.token for choice in corrected] == [5, 6]
    assert all(0.0 < choice.chance < 1.0 for choice in corrected)
