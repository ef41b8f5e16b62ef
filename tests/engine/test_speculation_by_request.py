"""A request names its drafter and limits its drafts; its text stays the same."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.control.adaptive import AdaptiveBudget
from foredraft.control.base import Controller
from foredraft.control.fixed import FixedBudget
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.engine import Engine
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.policy import Policy
from foredraft.models.table import TableModel
from tests.engine.helpers import drain

COST = CostModel(((1, 10.0), (8, 11.0)))
NAMES = ("suffix", "ngram")
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


def written(**asked: Any) -> tuple[tuple[int, ...], dict[str, int], int]:
    """A reply's tokens, who drafted how many of its drafts, and the largest draft."""
    target, largest = TableModel.random(6, seed=3), 0
    drafters = [build_drafter(name, DrafterContext(target)) for name in NAMES]
    loaded = [
        LoadedDrafter(drafter, target, name, joins_late=True)
        for drafter, name in zip(drafters, NAMES, strict=True)
    ]
    is_fixed, most_drafted = asked.pop("is_fixed", False), asked.pop("most_drafted", None)
    traits = [each.traits for each in loaded]
    controller: Controller = (
        FixedBudget(4, drafter="suffix") if is_fixed else AdaptiveBudget(traits, COST)
    )

    def look(record: Any) -> None:
        nonlocal largest
        largest = max(largest, *(len(row.proposal.tree) for row in record.rows))

    policy = Policy(controller, loaded, trace=look)
    policy.most_drafted = most_drafted
    engine = Engine(target, policy)
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=200, **asked)
    request_id = engine.submit(PROMPT, params)
    result = drain(engine)[request_id]
    return result.token_ids, result.stats.drafters, largest


def test_who_drafts_is_chosen_by_the_request() -> None:
    text, by_itself, _ = written()
    assert by_itself
    assert written(speculation="off") == (text, {}, 0)
    for name in NAMES:
        for is_fixed in (False, True):
            same, drafters, _ = written(speculation=name, is_fixed=is_fixed)
            assert same == text
            assert [*drafters] == [name]


def test_two_requests_of_one_batch_have_the_drafters_that_they_name() -> None:
    target = TableModel.random(6, seed=3, sharpness=9.0)
    loaded = [
        LoadedDrafter(build_drafter(name, DrafterContext(target)), target, name, joins_late=True)
        for name in NAMES
    ]
    controller = AdaptiveBudget([each.traits for each in loaded], COST)
    engine = Engine(target, Policy(controller, loaded))
    for name in NAMES:
        engine.submit(PROMPT, SamplingParams(max_tokens=200, speculation=name))
    assert [[*each.stats.drafters] for each in drain(engine).values()] == [["suffix"], ["ngram"]]


def test_who_has_another_drafter_loaded_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'suffix'\? \(here: auto, off, suffix") as told:
        written(speculation="sufix")
    assert told.value.field == "speculation"
    assert SamplingParams(speculation="self-draft").speculation == "self_draft"


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_drafts_are_limited_by_the_request(most: int, is_fixed: bool) -> None:
    text, _, _ = written(is_fixed=is_fixed)
    same, drafters, largest = written(max_draft_tokens=most, is_fixed=is_fixed)
    assert same == text
    assert largest == most
    assert bool(drafters) == (most > 0)
    assert written(speculation="off", is_fixed=is_fixed) == (text, {}, 0)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_drafts_are_limited_by_the_policy(is_fixed: bool) -> None:
    text, _, unlimited = written(is_fixed=is_fixed)
    same, _, largest = written(most_drafted=2, is_fixed=is_fixed)
    assert (same, largest) == (text, 2)
    assert unlimited > 2


def test_what_it_limits_is_checked() -> None:
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        SamplingParams(max_draft_tokens=-1)
    with pytest.raises(ConfigError, match="speculation"):
        SamplingParams(speculation=False)  # type: ignore[arg-type]
