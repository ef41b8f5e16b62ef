"""Candidates: the compiled pass and torch name the same tokens."""

from __future__ import annotations

import math

import pytest
import torch

from foredraft.core.choices import Choice
from foredraft.drafters.heads import rows as module
from foredraft.drafters.heads.rows import LEAST_CHANCE, Candidates


def of(logits_NR: torch.Tensor, count: int, scale: float) -> tuple[list[list[Choice]], ...]:
    if module._library() is None:
        pytest.skip("no compiled kernel here")
    found = Candidates(torch.arange(logits_NR.shape[1]) * 3)
    return found.likeliest(logits_NR, count, scale), found._by_torch(logits_NR, count, scale)


@pytest.mark.parametrize("num_rows", [1, 7, 63, 64, 1000, 8192])
@pytest.mark.parametrize(("count", "scale"), [(4, 1.0), (64, 1.4), (64, 0.1), (1, 1.0)])
def test_both_ways_agree(num_rows: int, count: int, scale: float) -> None:
    torch.manual_seed(num_rows + count)
    compiled, by_torch = of(3.0 * torch.randn(5, num_rows), min(count, num_rows), scale)
    for ours, theirs in zip(compiled, by_torch, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [chance for _, chance in ours] == pytest.approx([c for _, c in theirs], rel=1e-4)


def test_tokens_that_cannot_occur_are_not_named() -> None:
    compiled, by_torch = of(torch.tensor([[-math.inf, 1.0, -math.inf, 0.0, -30.0]]), 4, 1.0)
    assert [token for token, _ in compiled[0]] == [3, 9] == [token for token, _ in by_torch[0]]


def test_nothing_is_named_where_logits_are_broken() -> None:
    compiled, by_torch = of(torch.full((2, 40), math.nan), 4, 1.0)
    assert compiled == by_torch == [[], []]


def test_of_equal_logits_the_first_come_first() -> None:
    compiled, _ = of(torch.zeros(1, 200), 3, 1.0)
    assert compiled == [[Choice(token, pytest.approx(1 / 200)) for token in (0, 3, 6)]]
    assert LEAST_CHANCE < 1 / 200
