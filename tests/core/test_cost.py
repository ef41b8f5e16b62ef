"""The cost of a forward by its tokens: a model that is measured, then follows."""

from __future__ import annotations

import pytest

from foredraft.core.cost import Attention, CostModel, Times, price_of
from foredraft.core.errors import ConfigError

NEAR = ((1, 9.1), (2, 9.1), (3, 9.2), (4, 9.3), (5, 11.2), (8, 15.9), (12, 23.2), (17, 32.8))
FAR = ((1, 6.2), (2, 6.6), (3, 8.1), (4, 9.5), (5, 11.6), (8, 16.5), (12, 24.0), (17, 33.9))
"""Two states of one machine, minutes apart."""


@pytest.mark.parametrize("times", [NEAR, FAR])
def test_the_model_begins_with_what_was_measured(times: Times) -> None:
    cost = CostModel(times)
    assert dict(cost.times([n for n, _ in times])) == pytest.approx(dict(times))


@pytest.mark.parametrize(("before", "after"), [(NEAR, FAR), (FAR, NEAR)])
def test_times_follow_the_machine(before: Times, after: Times) -> None:
    cost, now = CostModel(before), dict(after)
    for _ in range(60):
        cost.observe([(1, 50)], now[1])
    for size in (1, 2, 3):  # untried sizes have moved as well
        assert cost.ms([(size, 50)]) == pytest.approx(now[size], rel=0.2)
    for size in (1, 4, 8) * 40:
        cost.observe([(size, 50)], now[size])
    for size, ms in now.items():
        assert cost.ms([(size, 50)]) == pytest.approx(ms, rel=0.2)


def test_one_slow_moment_changes_little_and_is_soon_forgotten() -> None:
    cost = CostModel(NEAR)
    before = cost.prices([50], 4)
    cost.observe([(1, 50)], 500.0)
    assert cost.ms([(1, 50)]) == pytest.approx(9.1, rel=0.2)
    for _ in range(8):
        cost.observe([(1, 50)], 9.1)
    assert cost.ms([(1, 50)]) == pytest.approx(9.1, rel=0.02)
    assert cost.prices([50], 4) == pytest.approx(before, rel=0.02)


def test_the_time_of_a_size_is_in_doubt_while_it_is_not_run_and_then_one_step_counts() -> None:
    cost = CostModel(NEAR)
    for size in (1, 4) * 20:
        cost.observe([(size, 50)], dict(NEAR)[size])
    known = cost.doubt(1, 4)
    for _ in range(200):
        cost.observe([(4, 50)], dict(NEAR)[4])
    assert cost.doubt(1, 4) > 2 * known
    cost.observe([(1, 50)], 6.0)
    assert cost.ms([(1, 50)]) == pytest.approx(6.0, rel=0.15)
    assert cost.ms([(4, 50)]) == pytest.approx(dict(NEAR)[4], rel=0.1)


def test_contexts_add_what_attention_takes_and_do_not_count_as_a_slower_machine() -> None:
    cost = CostModel(NEAR, Attention(entry_ms=0.001, pair_ms=0.0005))
    assert cost.ms([(1, 2000)]) == pytest.approx(9.1 + 2.0 + 1.0)
    assert cost.ms([(1, 2000), (3, 100)]) == pytest.approx(9.3 + 3.0 + 0.1 + 0.15)
    for _ in range(50):
        cost.observe([(1, 2000)], 9.1 + 3.0)
    assert cost.ms([(1, 0)]) == pytest.approx(9.1)


def test_the_context_that_times_were_measured_at_is_not_counted_twice() -> None:
    cost = CostModel(NEAR, Attention(entry_ms=0.002, pair_ms=0.001), context=100)
    assert cost.ms([(1, 100)]) == pytest.approx(9.1)
    assert cost.ms([(8, 0)]) == pytest.approx(15.9 - 1.0)


def test_a_clock_that_stands_still_or_jumps_ends_nothing() -> None:
    cost = CostModel(NEAR)
    for ms in (0.0, -5.0, 1e12) * 50:
        cost.observe([(1, 50)], ms)
    assert 0.0 < cost.ms([(4, 50)]) < 1e9


def test_a_price_is_a_share_of_what_all_rows_cost_together() -> None:
    cost = CostModel(NEAR)
    assert cost.prices([0] * 4, 1) == pytest.approx((1.0, 15.9 / 9.3))
    assert cost.prices([0], 3)[3] == pytest.approx(9.3 / 9.1)


def test_prices_are_joined_by_straight_lines_and_rise_on() -> None:
    prices = (1.0, 1.1, 1.3)
    assert [price_of(prices, n) for n in (0, 1, 1.5, 2, 4)] == pytest.approx(
        [1.0, 1.1, 1.2, 1.3, 1.6]
    )
    assert price_of((1.0,), 8) == 1.0


@pytest.mark.parametrize(
    "times",
    [
        (),
        ((1, 9.0), (1, 10.0)),
        ((4, 9.0), (2, 10.0)),
        ((0, 3.0),),
        ((1, -2.0),),
        ((1, float("nan")),),
    ],
)
def test_times_that_make_no_sense_are_refused(times: Times) -> None:
    with pytest.raises(ConfigError):
        CostModel(times)


def test_a_size_that_was_measured_beside_a_neighbour_finds_its_place() -> None:
    """Overestimated costs, within the range that the first steps correct, would stop all
    drafting."""
    truth = {1: 3.8, 2: 3.85, 3: 4.5, 4: 5.4}
    disturbed = {1: 1.0, 2: 1.2, 3: 1.25, 4: 1.1}
    cost = CostModel(tuple((size, ms * disturbed[size]) for size, ms in truth.items()))
    for size in (1, 2, 1, 3, 1, 4) * 20:
        cost.observe([(size, 50)], truth[size])
    for size, ms in truth.items():
        assert cost.ms([(size, 50)]) == pytest.approx(ms, rel=0.06)


def test_a_slower_machine_is_no_dearer_size() -> None:
    """Seen by steps of three tokens alone, which say nothing of how they stand to fewer."""
    cost = CostModel(NEAR)
    before = [ms for _, ms in cost.times((1, 2, 3))]
    for _ in range(100):
        cost.observe([(3, 50)], 2 * before[2])
    after = [ms for _, ms in cost.times((1, 2, 3))]
    assert [new / old for new, old in zip(after, before, strict=True)] == pytest.approx(
        [2.0] * 3, rel=0.05
    )


@pytest.mark.parametrize(
    ("times", "tokens"),
    [
        (((1, 23.8), (2, 25.0), (4, 32.0), (8, 57.5), (17, 110.0)), 64),  # 1.5B in 4 bits, AVX2
        (((1, 24.5), (8, 29.6), (24, 86.0), (48, 167.0)), 128),  # the same, AVX-512
        (((1, 7.0), (8, 8.0), (24, 15.0), (48, 29.0)), 512),  # 135M
        (((1, 4.8), (8, 4.9), (24, 4.9), (48, 5.0)), 512),  # 8B on a GPU
        (((1, 50.0), (8, 300.0), (24, 600.0), (48, 650.0)), 512),  # many experts: read once for all
    ],
)
def test_a_step_reads_as_much_of_prompts_as_others_can_wait_for(times: Times, tokens: int) -> None:
    assert CostModel(times).prompt_tokens(512) == tokens
    assert CostModel(times).prompt_tokens(1) == 1
