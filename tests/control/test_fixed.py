"""A fixed budget, capped where nothing more could be committed."""

from __future__ import annotations

import pytest

from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.request import Request


def row(num_tokens: int, max_tokens: int = 100, num_prompt: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(0, 0, [0] * num_tokens, num_prompt, params, seed=0)


def test_is_the_same_each_step() -> None:
    control = FixedBudget(5, max_context=1000)
    rows = [row(3), row(90)]
    assert control.budget(rows) == [5, 5]
    control.observe(rows)
    assert control.budget(rows) == [5, 5]
    assert control.budget([]) == []


@pytest.mark.parametrize(
    ("generated", "max_tokens", "budget"), [(0, 10, 5), (5, 10, 4), (8, 10, 1), (9, 10, 0)]
)
def test_leaves_room_for_the_targets_own_token(
    generated: int, max_tokens: int, budget: int
) -> None:
    assert FixedBudget(5, 1000).budget([row(1 + generated, max_tokens)]) == [budget]


@pytest.mark.parametrize(("num_tokens", "budget"), [(90, 5), (96, 4), (99, 1), (100, 0)])
def test_stays_inside_the_context(num_tokens: int, budget: int) -> None:
    assert FixedBudget(5, max_context=100).budget([row(num_tokens)]) == [budget]


def test_zero_drafts_nothing() -> None:
    assert FixedBudget(0, 100).budget([row(3)]) == [0]


@pytest.mark.parametrize("bad", [-1, 1.0, True, None, "4"])
def test_refuses_what_is_no_number_of_tokens(bad: object) -> None:
    with pytest.raises(ConfigError, match=f"num_draft_tokens is {bad!r}"):
        FixedBudget(bad, 100)  # type: ignore[arg-type]
