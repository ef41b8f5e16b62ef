"""Every loss against values computed by hand and gradients by automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.train.acceptance import gumbel_acceptance, shares_by_depth, tokens_a_step
from foredraft.train.losses import LOSSES, Goal, loss_named, product_loss

P = torch.tensor([[0.5, 0.25, 0.25]])
LOGITS = torch.tensor([[math.log(2.0), math.log(1.0), math.log(1.0)]])  # q = 1/2, 1/4, 1/4
SKEWED = torch.tensor([[math.log(1.0), math.log(1.0), math.log(2.0)]])  # q = 1/4, 1/4, 1/2
ROWS = torch.tensor([[0, 1, 2]])


def value(name: str, logits: Tensor, label: int = 0) -> float:
    goal = Goal(ROWS, P, torch.tensor([0]), torch.tensor([label]), torch.ones(1))
    return float(product_loss(logits, torch.eye(3), goal, LOSSES[name])[0])


ENTROPY = 0.5 * math.log(2) + 0.5 * math.log(4)
CROSS = 0.5 * math.log(4) + 0.25 * math.log(4) + 0.25 * math.log(2)


@pytest.mark.parametrize(
    ("name", "equal", "skewed"),
    [
        ("soft", ENTROPY, CROSS),
        ("hard", math.log(2), math.log(4)),
        ("tv", 0.0, 0.25),
        ("nla", 0.0, -math.log(0.75)),
        (
            "lk",
            math.exp(-3) * ENTROPY,
            math.exp(-2.25) * CROSS + (1 - math.exp(-2.25)) * 0.25,
        ),
    ],
)
def test_values_by_hand(name: str, equal: float, skewed: float) -> None:
    assert value(name, LOGITS) == pytest.approx(equal, abs=1e-6)
    assert value(name, SKEWED) == pytest.approx(skewed, abs=1e-6)


def plainly(name: str, logits: Tensor, probs: Tensor, labels: Tensor) -> Tensor:
    """The losses as they are written down, for automatic differentiation."""
    log_q = logits.log_softmax(-1)
    overlap = torch.minimum(log_q.exp(), probs).sum(-1)
    soft, tv = -(probs * log_q).sum(-1), 1 - overlap
    hard = -log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    weight = torch.exp(-3 * overlap.detach())
    formulas: dict[str, Callable[[], Tensor]] = {
        "soft": lambda: soft,
        "hard": lambda: hard,
        "tv": lambda: tv,
        "nla": lambda: -overlap.log(),
        "lk": lambda: weight * soft + (1 - weight) * tv,
    }
    return formulas[name]()


@pytest.mark.parametrize("name", LOSSES)
def test_product_loss_and_its_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer candidates than rows, a target with mass elsewhere, and a label without a row.

    The product is made in parts, and the loss of a part in pieces.
    """
    monkeypatch.setattr("foredraft.train.losses._SMALLEST", 1e-9)
    monkeypatch.setattr("foredraft.train.losses._PRODUCT_ELEMENTS", 7 * 37)
    monkeypatch.setattr("foredraft.train.losses._CPU_ELEMENTS", 3 * 37)
    torch.manual_seed(1)
    num, rows, size, candidates = 40, 37, 8, 9
    states = torch.randn(num, size, requires_grad=True)
    output = torch.randn(rows, size, requires_grad=True)
    among = torch.stack([torch.randperm(rows)[:candidates] for _ in range(num)])
    probs = torch.rand(num, candidates) / candidates
    labels = torch.randint(-1, rows, (num,))
    weights = torch.rand(num)
    goal = Goal(among, probs, torch.arange(num), labels, weights)
    summed, overlap = product_loss(states, output, goal, loss_named(name))
    (summed * 1.5).backward()
    found = states.grad, output.grad
    states.grad = output.grad = None
    whole = torch.zeros(num, rows).scatter(1, among, probs)
    expected = (plainly(name, states @ output.T, whole, labels) * weights).sum()
    (expected * 1.5).backward()
    assert float(summed.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(found, (states.grad, output.grad), rtol=1e-4, atol=1e-5)
    q = (states @ output.T).softmax(-1)
    torch.testing.assert_close(overlap, torch.minimum(q, whole).sum(-1), rtol=1e-5, atol=1e-6)


def test_an_unknown_loss_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'soft'"):
        loss_named("sotf")


# ---------------------------------------- acceptance as it is measured: by hand, and by brute force


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


def test_shares_by_depth_are_of_places_where_all_before_were_right() -> None:
    # The first token of a reply is never drafted. Chains: R R W, R W, W, R; and none.
    shares = shares_by_depth([[False, True, True, False, True], [True]], 3)
    assert shares == [3 / 4, 1 / 2, 0.0]
    assert tokens_a_step(shares) == 1 + 3 / 4 + 3 / 8
