"""One pool of draft positions, the likeliest first."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foredraft.control.acceptance import PositionCounts, is_constrained, kind_of
from foredraft.control.ledger import Ledger
from foredraft.control.pooled import DrafterCost, Pooled, PooledRow, best_prefix
from foredraft.control.times import DraftTimes
from foredraft.core.params import SamplingParams

FREE = DrafterCost((0.0,) * 64, (0.0,) * 64)


def row(*chances: float) -> PooledRow:
    """Slots that are always filled, accepted with these chances."""
    return PooledRow(len(chances), np.array([[1.0] * len(chances), chances]))


def pooled(
    rows: Sequence[PooledRow],
    num_plain: int,
    slope: float,
    cost: DrafterCost = FREE,
    most_nodes: int = 99,
    most_ms: float = float("inf"),
) -> Pooled:
    """Where each node adds ``slope`` plain steps."""
    step_ms = [1.0 + slope * n for n in range(most_nodes + 1)]
    return best_prefix(rows, num_plain, step_ms, {"": cost}, most_ms)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_of_all_budgets(seed: int) -> None:
    """Where later slots of a row are never likelier than earlier ones, and times never fall."""
    draw = random.Random(seed)
    rows = [row(*sorted((draw.random() for _ in range(3)), reverse=True)) for _ in range(3)]
    slope = draw.choice([0.02, 0.1, 0.3])

    def step_ms(nodes: int) -> float:
        return 1.0 + slope * nodes

    best = pooled(rows, 3, slope)
    rates = [
        (3 + sum(sum(r.rates_2K[1][:n]) for r, n in zip(rows, budgets, strict=True)))
        / step_ms(sum(budgets))
        for budgets in itertools.product(range(4), repeat=3)
    ]
    assert best.rate == pytest.approx(max(rates))


def test_a_slot_behind_an_unlikely_one_comes_with_it_or_not_at_all() -> None:
    assert pooled([row(0.1, 0.9)], 1, 0.3).budgets == (2,)
    assert pooled([row(0.1, 0.3)], 1, 0.3).budgets == (0,)


def test_of_positions_that_come_together_some_may_come_where_all_cannot_be_paid() -> None:
    """A drafter that ends what it doubts is right more often where it goes on."""
    sure = PooledRow(4, np.array([[1.0, 0.7, 0.5, 0.35], [0.7, 0.55, 0.45, 0.33]]))
    cost = DrafterCost((0.0, 0.3), FREE.following, by_token=True)
    assert pooled([sure], 1, 0.05, cost).budgets == (4,)
    assert pooled([sure], 1, 0.05, cost, most_ms=1.8).budgets == (2,)


def test_a_forward_that_may_not_be_run_is_charged_as_often_as_it_is() -> None:
    seldom = PooledRow(2, np.array([[1.0, 0.1], [0.9, 0.1]]))
    both = pooled([seldom], 1, 0.0, DrafterCost((0.0, 0.3), FREE.following, by_token=True))
    assert both.budgets == (2,)
    assert both.ms == pytest.approx(1.0 + 0.3 + 0.03)
    assert both.worst_ms == pytest.approx(1.0 + 0.6)


def test_limits_hold() -> None:
    rows = [row(*(0.9 - 0.01 * slot for slot in range(8)))] * 4
    assert sum(pooled(rows, 4, 0.01, most_nodes=16).budgets) == 16
    paid = pooled(rows, 4, 0.01, most_ms=1.055)
    assert sum(paid.budgets) == 5
    assert paid.worst_ms <= 1.055
    assert paid.best_rate > paid.rate
    dear = pooled(rows, 4, 0.01, DrafterCost((0.0, 9.0, 18.0, 27.0, 36.0), FREE.following))
    assert sum(dear.budgets) == 0
    assert 0.0 < dear.best_rate < 4.0


def test_a_forward_a_token_is_charged_by_depth_and_once_for_all_rows() -> None:
    """Two rows to depth 2: two forwards of both."""
    rows = [row(0.9, 0.8), row(0.9, 0.8)]
    cost = DrafterCost((0.0, 0.1, 0.12), FREE.following, by_token=True)
    both = pooled(rows, 2, 0.0, cost)
    assert both.budgets == (2, 2)
    assert both.ms == pytest.approx(1.0 + 2 * 0.12)


def test_two_drafters_share_a_step_and_each_is_charged_once() -> None:
    rows = [replace(row(0.9, 0.8), drafter=name) for name in ("a", "a", "b")]
    costs = {
        "a": DrafterCost((0.0, 0.3, 0.3), FREE.following),
        "b": DrafterCost((0.0, 0.2), FREE.following),
    }
    best = best_prefix(rows, 3, [1.0] * 10, costs)
    assert best.budgets == (2, 2, 2)
    assert best.ms == pytest.approx(1.5)


def test_slots_are_counted_where_they_were_allowed() -> None:
    counts = PositionCounts(memory=1.0)
    counts.counts[:, :2] = [[10.0, 10.0], [8.0, 4.0], [6.0, 1.0]]
    rates_2K = counts.rates(np.zeros((2, counts.counts.shape[1])), weight=1e-9)
    assert rates_2K[:, :2] == pytest.approx(np.array([[0.8, 0.4], [0.6, 0.1]]))


def test_requests_that_are_bent_are_known() -> None:
    assert not is_constrained(SamplingParams(temperature=0.7, top_p=0.9, stop=("x",)))
    for bent in ({"logit_bias": {1: 2.0}}, {"presence_penalty": 0.5}, {"allowed_token_ids": (1,)}):
        assert is_constrained(SamplingParams.of(**bent))
    assert kind_of(SamplingParams()) != kind_of(SamplingParams(temperature=1.0))


def test_times_go_by_the_nearest_number_of_rows() -> None:
    times = DraftTimes()
    assert times.round_ms("a", 2) is None
    assert times.follow_ms("a", 2) == 0.0
    times.observe("a", 1, 2.0, 1, 0.5)
    times.observe("a", 16, 16.0, 16, 1.6)
    assert times.round_ms("a", 1) == pytest.approx(2.0)
    assert times.follow_ms("a", 1) == pytest.approx(0.5)
    assert times.round_ms("a", 16) == pytest.approx(16.0)
    assert times.follow_ms("a", 16) == pytest.approx(1.6)
    assert times.round_ms("a", 0) == 0.0
    assert times.most_rows("a") == 16
    times.observe("a", 1, 400.0, 1, 0.5)  # a hiccup
    assert times.round_ms("a", 1) < 3.5


def test_a_drafter_of_many_forwards_is_timed_by_the_forward() -> None:
    times = DraftTimes()
    for num_rounds in (8, 4, 1):
        spent = times.observe("a", 2, 3.0 * num_rounds, 0, 0.0, num_rounds)
        assert spent == pytest.approx(3.0 * num_rounds)
        assert times.round_ms("a", 2) == pytest.approx(3.0)
    assert times.observe("a", 2, 0.1, 0, 0.0, num_rounds=0) == pytest.approx(0.1)
    assert times.round_ms("a", 2) == pytest.approx(3.0)


def test_a_ledger_opens_with_little_and_is_limited() -> None:
    alone, crowd = Ledger(), Ledger()
    alone.begin(10.0, 1), crowd.begin(20.0, 16)
    assert (alone.balance_ms, crowd.balance_ms) == (40.0, 30.0)
    ledger = Ledger(share=0.01)
    assert ledger.can_lose(15.0, 10.0)
    assert not ledger.can_lose(15.1, 10.0)
    ledger.book(25.0, 10.0, 10.0)
    assert not ledger.can_lose(0.2, 10.0)
    for _ in range(1000):
        ledger.book(5.0, 10.0, 10.0)
    assert ledger.balance_ms == pytest.approx(80.0)
    assert ledger.saved_ms == pytest.approx(4985.0)
