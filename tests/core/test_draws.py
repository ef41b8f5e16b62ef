"""Rows drawn together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foredraft.core.noise import gumbel_argmax
from foredraft.core.sampling import draw_rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab", [1, 7, 255, 256, 257, 1000])
def test_rows_drawn_together_are_drawn_as_each_alone(dtype: Any, vocab: int) -> None:
    """Also where the likeliest token is taken, and where rows are left out."""
    generator = np.random.default_rng(vocab)
    logits_NV = generator.normal(0.0, 3.0, (6, vocab)).astype(dtype)
    logits_NV[2] = 1.0  # of equal ones the first
    rows = [
        *((4, (3, 0, 1.0)), (0, (1 << 63, 17, 0.0))),
        *((2, (0, 1 << 40, 1.7)), (5, (9, 5, 0.0))),
    ]
    draws = draw_rows(torch.from_numpy(logits_NV), rows)
    if None in draws:
        pytest.skip("there is no compiler here")
    for draw, (row, (seed, position, scale)) in zip(draws, rows, strict=True):
        assert draw is not None
        logits_V = logits_NV[row]
        assert draw.token == int(logits_V.argmax())
        alone = gumbel_argmax(logits_V, seed, position, scale) if scale else draw.token
        assert (draw.drawn, draw.scale) == (alone, scale or None)
        assert torch.equal(draw.given_V, torch.from_numpy(logits_V))


def test_rows_that_are_not_finite_are_left_to_others() -> None:
    logits_NV = np.zeros((4, 300), np.float32)
    logits_NV[1, 5], logits_NV[2, 7], logits_NV[3] = np.nan, np.inf, -np.inf
    draws = draw_rows(torch.from_numpy(logits_NV), [(i, (0, 0, 1.0 * (i < 3))) for i in range(4)])
    assert draws[1:] == [None, None, None]
