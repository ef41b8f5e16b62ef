"""A fixed budget: the same each step, by the same drafter, at the price of the batch."""

from __future__ import annotations

import pytest

from foredraft.control.fixed import FixedBudget
from foredraft.core.cost import Attention, CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.record import StepRecord, StepTimes
from foredraft.engine.request import Request
from tests.engine.helpers import new_request


def row(num_tokens: int) -> Request:
    return new_request([0] * num_tokens, drafter="own")


def budgets(control: FixedBudget, *rows: Request) -> list[int]:
    return [allowance.budget for allowance in control.allow(rows)]


def test_is_the_same_each_step() -> None:
    control = FixedBudget(5)
    rows = [row(3), row(90)]
    assert budgets(control, *rows) == [5, 5]
    control.observe(StepRecord((), StepTimes(0.0, 9.0, 0.0, 0.0)))
    assert budgets(control, *rows) == [5, 5]
    assert control.allow([]) == []


def test_it_leaves_a_row_to_whoever_drafts_for_it() -> None:
    """One that a drafter failed for stays alone."""
    control = FixedBudget(5, drafter="x")
    assert control.begin(row(3), []) == "x"
    alone, followed = new_request([1], drafter=None), new_request([1], drafter="x")
    assert [each.drafter for each in control.allow([alone, followed])] == [None, "x"]
    assert FixedBudget(0, drafter=None).begin(row(3), []) is None


@pytest.mark.parametrize("bad", [-1, 1.0, True, None, "4"])
def test_refuses_what_is_no_number_of_tokens(bad: object) -> None:
    with pytest.raises(ConfigError, match=f"num_draft_tokens is {bad!r}"):
        FixedBudget(bad)  # type: ignore[arg-type]


def test_a_price_is_the_rows_share_of_a_batch_that_drafts_alike() -> None:
    cost = CostModel(((1, 10.0), (2, 10.0), (4, 12.0), (8, 20.0)), Attention(0.001, 0.0))
    (alone,) = FixedBudget(5, cost).allow([row(100)])
    assert alone.prices[0] == 1.0
    assert alone.prices[3] == pytest.approx((12.0 + 0.1) / (10.0 + 0.1))
    both = FixedBudget(5, cost).allow([row(100), row(100)])
    assert both[0].prices[3] == pytest.approx((20.0 + 0.2) / (10.0 + 0.2))


def test_rows_of_other_controllers_share_the_step() -> None:
    cost = CostModel(((1, 10.0), (2, 10.0), (4, 12.0), (8, 20.0)), Attention(0.001, 0.0))
    (one, _) = FixedBudget(5, cost).allow([row(100), row(100)])
    (beside,) = FixedBudget(5, cost).allow([row(100)], [row(100)])
    assert beside.prices == one.prices
