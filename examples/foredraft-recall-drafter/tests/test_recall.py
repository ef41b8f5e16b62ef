"""The example works as an installed package: registered, exact, and worth something."""

from __future__ import annotations

import pytest
from foredraft_recall import RecallDrafter

from foredraft import GenerationResult, SamplingParams
from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import ConfigError
from foredraft.drafters import build_drafter, drafter_names
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.engine import Engine
from foredraft.engine.policy import Policy
from foredraft.models.table import TableModel


def generate(target: TableModel, drafter: Drafter, params: SamplingParams) -> GenerationResult:
    engine = Engine(target, Policy.of(target, drafter, FixedBudget(4)))
    engine.submit([1, 2], params)
    return next(event.result for event in engine.run() if event.result is not None)


def draft_after(drafter: Drafter, token: int) -> tuple[int, ...]:
    row = DraftRow.of(0, (token,), SamplingParams(), budget=4)
    return drafter.propose([row])[0].tree.tokens


def test_is_registered_by_its_entry_point() -> None:
    assert "recall" in drafter_names()
    context = DrafterContext(TableModel.random(5, seed=0), options={"context_size": 2})
    assert isinstance(build_drafter("recall", context), RecallDrafter)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_text_equals_plain_decoding_with_the_same_seed(temperature: float) -> None:
    target = TableModel.random(5, seed=1)
    plain = build_drafter("none", DrafterContext(target))
    recall = RecallDrafter(context_size=1)
    for seed in range(10):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=40)
        expected = generate(target, plain, params)
        assert generate(target, recall, params).token_ids == expected.token_ids


def test_the_second_time_costs_fewer_steps() -> None:
    target, params = TableModel.random(50, seed=2), SamplingParams(max_tokens=20)
    drafter = RecallDrafter()
    first, second = (generate(target, drafter, params) for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.stats.steps < first.stats.steps


def test_forgets_the_oldest_first() -> None:
    drafter = RecallDrafter(context_size=1, max_entries=2)
    drafter.begin(DraftRow.of(0, [1, 2, 3, 4]))
    assert draft_after(drafter, 1) == ()
    assert draft_after(drafter, 2) == (3, 4)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_refuses_a_size_that_is_none(bad: object) -> None:
    with pytest.raises(ConfigError, match="context_size"):
        RecallDrafter(context_size=bad)  # type: ignore[arg-type]
