"""A fixed budget, capped where nothing more could be committed."""

from __future__ import annotations

import pytest

from foredraft.control.fixed import FixedBudget
from foredraft.core.cost import Attention, CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL
from foredraft.core.record import RowRecord, StepRecord, StepTimes
from foredraft.core.request import Request


def row(num_tokens: int, max_tokens: int = 100, num_prompt: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(0, 0, [0] * num_tokens, num_prompt, params, seed=0)


def budgets(control: FixedBudget, *rows: Request) -> list[int]:
    return [allowance.budget for allowance in control.allow(rows)]


def test_is_the_same_each_step() -> None:
    control = FixedBudget(5, max_context=1000)
    rows = [row(3), row(90)]
    assert budgets(control, *rows) == [5, 5]
    control.observe(StepRecord((), StepTimes(0.0, 9.0, 0.0, 0.0)))
    assert budgets(control, *rows) == [5, 5]
    assert control.allow([]) == []


@pytest.mark.parametrize(
    ("generated", "max_tokens", "budget"), [(0, 10, 5), (5, 10, 4), (8, 10, 1), (9, 10, 0)]
)
def test_leaves_room_for_the_targets_own_token(
    generated: int, max_tokens: int, budget: int
) -> None:
    assert budgets(FixedBudget(5, 1000), row(1 + generated, max_tokens)) == [budget]


@pytest.mark.parametrize(("num_tokens", "budget"), [(90, 5), (96, 4), (99, 1), (100, 0)])
def test_stays_inside_the_context(num_tokens: int, budget: int) -> None:
    assert budgets(FixedBudget(5, max_context=100), row(num_tokens)) == [budget]


def test_zero_drafts_nothing() -> None:
    assert budgets(FixedBudget(0, 100), row(3)) == [0]


@pytest.mark.parametrize("bad", [-1, 1.0, True, None, "4"])
def test_refuses_what_is_no_number_of_tokens(bad: object) -> None:
    with pytest.raises(ConfigError, match=f"num_draft_tokens is {bad!r}"):
        FixedBudget(bad, 100)  # type: ignore[arg-type]


def test_a_price_is_the_rows_share_of_a_batch_that_drafts_alike() -> None:
    cost = CostModel(((1, 10.0), (2, 10.0), (4, 12.0), (8, 20.0)), Attention(0.001, 0.0))
    (alone,) = FixedBudget(5, 1000, cost).allow([row(100)])
    assert alone.price.ms(0) == pytest.approx(10.0 + 0.1)
    assert alone.price.ms(3) == pytest.approx(12.0 + 0.1)
    both = FixedBudget(5, 1000, cost).allow([row(100), row(100)])
    assert both[0].price.ms(3) == pytest.approx(20.0 / 2 + 0.1)


def test_the_cost_follows_decoding_steps_and_no_others() -> None:
    cost = CostModel(((1, 10.0), (2, 10.0), (4, 12.0), (8, 20.0)))
    control = FixedBudget(5, 1000, cost)
    for num_read in (300, 1):
        part = RowRecord(0, 50, num_read, 5, NO_PROPOSAL, None, (), 0, None)
        for _ in range(40):
            control.observe(StepRecord((part,), StepTimes(0.0, 5.0, 0.0, 0.0)))
        assert (cost.ms([(1, 50)]) < 6.0) == (num_read == 1)
