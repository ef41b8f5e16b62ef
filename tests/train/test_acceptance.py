"""Acceptance as it is measured: by hand, and by brute force."""

from __future__ import annotations

import torch

from foredraft.train.acceptance import gumbel_acceptance, shares_by_depth, tokens_a_step


def by_definition(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The sum over x of 1 / sum_y max(p_y / p_x, q_y / q_x), tokens outside q included."""
    other = 1 - p.sum()
    p, q = torch.cat((p, other[None])), torch.cat((q, torch.zeros(1)))
    total = torch.zeros(())
    for x in range(len(p)):
        if p[x] > 0 and q[x] > 0:
            total += 1 / torch.maximum(p / p[x], q / q[x]).sum()
    return total


def test_shared_noise_agrees_as_often_as_the_formula_says() -> None:
    torch.manual_seed(0)
    p, q = (3 * torch.randn(5, 9)).softmax(-1) * 0.8, (3 * torch.randn(5, 9)).softmax(-1)
    expected = torch.stack([by_definition(a, b) for a, b in zip(p, q, strict=True)])
    torch.testing.assert_close(gumbel_acceptance(p, q).float(), expected, rtol=1e-4, atol=1e-6)


def test_shared_noise_agrees_as_often_as_draws_do() -> None:
    torch.manual_seed(0)
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.2, 0.5, 0.3]])
    noise = -torch.rand(200_000, 3, dtype=torch.float64).log().neg().log()
    same = (p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)
    assert abs(float(gumbel_acceptance(p, q)) - float(same.double().mean())) < 0.005


def test_equal_distributions_always_agree() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0]])
    assert abs(float(gumbel_acceptance(p, p)) - 1.0) < 1e-6


def test_shares_by_depth_are_of_places_where_all_before_were_right() -> None:
    # The first token of a reply is never drafted. Chains: R R W, R W, W, R; and none.
    shares = shares_by_depth([[False, True, True, False, True], [True]], 3)
    assert shares == [3 / 4, 1 / 2, 0.0]
    assert tokens_a_step(shares) == 1 + 3 / 4 + 3 / 8
