"""Tokens that a grammar leaves no choice about are drafted for free, whatever the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from foredraft.control.adaptive import AdaptiveBudget
from foredraft.control.fixed import FixedBudget
from foredraft.core.cost import CostModel
from foredraft.core.errors import GrammarError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import StepRecord
from foredraft.core.rules.book import NewRules, new_rules
from foredraft.core.traits import DrafterTraits
from foredraft.drafters import build_drafter
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.engine import Engine, EngineOptions
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.policy import Policy
from foredraft.engine.request import GenerationResult
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.engine.helpers import LETTERS, finish, letters, limited, new_request

FORM = "ab?cdefg?hij?abcdef"
"""The form of replies: required letters, and positions for any letter."""
PARAMS = SamplingParams(temperature=1.0, max_tokens=60, grammar=Grammar.regex("a form"))


class Form:
    """A `Matcher` of `FORM`."""

    def __init__(self, is_lame: bool = False) -> None:
        self._place, self._is_lame = 0, is_lame

    def mask(self) -> Any:
        wanted = FORM[self._place] if self._place < len(FORM) else ""
        return np.array([letter == wanted or wanted == "?" for letter in LETTERS])

    def permits(self, token: int) -> bool:
        return bool(self.mask()[token])

    def consume(self, token: int) -> bool:
        if not self.permits(token):
            return False
        self._place += 1
        return True

    def copy(self) -> Form:
        other = Form(self._is_lame)
        other._place = self._place
        return other

    def forced(self) -> Sequence[int]:
        if self._is_lame:
            raise GrammarError("too complex to look ahead")
        left = FORM[self._place :].split("?")[0]
        return [LETTERS.index(letter) for letter in left]

    def is_complete(self) -> bool:
        return self._place == len(FORM)


class Counted(BaseDrafter):
    """Drafts nothing, and counts how often it is asked."""

    num_asked = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.num_asked += len(rows)
        return NoDrafter().propose(rows)


class Nothing(AdaptiveBudget):
    """An adaptive controller that finds that no drafter pays."""

    def __init__(self) -> None:
        super().__init__([DrafterTraits("x", 4, True)], CostModel(((1, 10.0), (8, 11.0))))

    def allow(self, rows: Any, others: Any = ()) -> Any:
        allowances = super().allow(rows, others)
        return [replace(allowance, budget=0) for allowance in allowances]


def rules_with(form: Form) -> NewRules:
    return partial(new_rules, vocab_size=len(LETTERS), new_matcher=lambda _: form)


def run(
    adaptive: bool,
    params: SamplingParams = PARAMS,
    target: TableModel | None = None,
    is_lame: bool = False,
) -> tuple[list[GenerationResult], list[StepRecord], Counted]:
    target = target or TableModel.random(len(LETTERS), seed=3)
    drafter, steps = Counted(), list[StepRecord]()
    controller = Nothing() if adaptive else FixedBudget(0, drafter="x")
    engine = Engine(
        target,
        Policy(controller, [LoadedDrafter(drafter, target, "x", 4, joins_late=True)]),
        EngineOptions(
            new_decoder=letters,
            new_rules=rules_with(Form(is_lame)),
            trace=steps.append,
            new_seed=lambda: 7,
        ),
    )
    for seed in range(4):
        engine.submit([seed], SamplingParams.of(**vars(params) | {"seed": seed}))
    return [*finish(engine).values()], steps, drafter


@pytest.mark.parametrize("coupling", ["seeded", "drawn"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_they_are_committed_several_a_step_though_nothing_may_be_drafted(
    temperature: float, coupling: str
) -> None:
    params = SamplingParams.of(**vars(PARAMS) | {"temperature": temperature, "coupling": coupling})
    results, steps, drafter = run(True, params)
    plain, plain_steps, _ = run(False, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert {r.finish_reason for r in results} == {"stop"}
    num_open = FORM.count("?")
    for result in results:
        assert result.stats.accepted == result.stats.drafted == len(FORM) - num_open
        assert result.stats.steps <= num_open + 1
    assert len(plain_steps) == len(FORM)
    assert drafter.num_asked == 0, "they cost no drafter"
    assert all(row.budget == 0 for step in steps for row in step.rows)


def test_they_are_credited_to_the_rules_though_a_drafter_goes_on_behind_them() -> None:
    target, steps = TableModel.random(len(LETTERS), seed=3), list[StepRecord]()
    suffix = LoadedDrafter(build_drafter("suffix", DrafterContext(target)), target, "suffix")
    engine = Engine(
        target,
        Policy(FixedBudget(8, drafter="suffix"), [suffix]),
        EngineOptions(new_decoder=letters, new_rules=rules_with(Form()), trace=steps.append),
    )
    engine.submit([0, 1, 2, 0, 1, 2, 0], PARAMS)
    (result,) = finish(engine).values()
    num_forced = sum(row.num_forced for step in steps for row in step.rows)
    assert result.stats.drafters["rules"] == num_forced > 0
    assert sum(result.stats.drafters.values()) == result.stats.drafted


def test_max_tokens_and_memory_hold_for_them_too() -> None:
    for most in (1, 2, 5):
        results, _, _ = run(True, SamplingParams.of(**vars(PARAMS) | {"max_tokens": most}))
        assert {len(result.token_ids) for result in results} == {most}
        assert {result.finish_reason for result in results} == {"length"}
    small = limited(TableModel.random(len(LETTERS), seed=3), 70)
    results, _, _ = run(True, target=small)
    assert [r.token_ids for r in results] == [r.token_ids for r in run(False)[0]]
    assert small.cache.slots == []


def test_a_grammar_that_cannot_look_ahead_is_followed_plainly() -> None:
    results, _, _ = run(True, is_lame=True)
    assert [r.token_ids for r in results] == [r.token_ids for r in run(False)[0]]
    assert all(result.stats.drafted == 0 for result in results)


@pytest.mark.parametrize(
    ("options", "drafts"),
    [({"drafter": "none"}, False), ({"num_draft_tokens": 0}, False), ({"drafter": "ngram"}, True)],
)
def test_whoever_asks_for_plain_decoding_gets_it(options: dict[str, Any], drafts: bool) -> None:
    llm = LLM(
        TableModel.random(len(LETTERS), seed=3), None, LoadOptions(**{"drafter": "ngram"} | options)
    )
    row = new_request([1, 2], drafter=llm.drafter_name, room=9)
    assert [allowance.num_forced > 0 for allowance in llm.controller.allow([row])] == [drafts]
