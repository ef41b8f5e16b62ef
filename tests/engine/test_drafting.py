"""A row's drafter is in one field; forced and forbidden tokens apply to all drafters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foredraft import speculation
from foredraft.control.base import Allowance, Row
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.record import RowStep, StepRecord
from foredraft.core.rules.base import Rules
from foredraft.core.sampling import Law, law_of
from foredraft.core.traits import OWN, DrafterTraits
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.spec import DrafterContext
from foredraft.engine import drafting
from foredraft.engine.engine import Engine, EngineOptions
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.policy import Policy
from foredraft.engine.request import GenerationResult, Request
from foredraft.engine.turn import Turn
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.engine.helpers import counting_model, drain

TARGET = TableModel.random(10, seed=1)


class Wants:
    """A scripted controller, by request."""

    def __init__(self, **drafters: Any) -> None:
        self.first: dict[int, str | None] = {}
        self.next: dict[int, Allowance] = {}
        self.others: list[int] = []
        self.steps: list[StepRecord] = []

    def begin(self, row: Row, others: Sequence[Row]) -> str | None:
        return self.first.get(row.request_id)

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        self.others = [row.request_id for row in others]
        return [self.next.get(row.request_id, Allowance(row.drafter, 2)) for row in rows]

    def observe(self, record: StepRecord) -> None:
        self.steps.append(record)

    def end(self, request_id: int) -> None:
        pass


class Noted(BaseDrafter):
    """Drafts its own number and records its calls."""

    def __init__(self, token: int, taps: Sequence[int] = ()) -> None:
        self.token, self.taps = token, taps
        self.begun: dict[int, tuple[int, ...]] = {}
        self.seen: list[int] = []
        self.params: list[SamplingParams] = []

    def begin(self, row: DraftRow) -> None:
        self.begun[row.request_id] = tuple(row.tokens)
        self.params.append(row.params)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.params += [row.params for row in rows]
        return [Proposal.chosen(TokenTree.chain([self.token] * row.budget)) for row in rows]

    def observe(self, observations: Sequence[RowStep]) -> None:
        self.seen += [seen.request_id for seen in observations]

    def end(self, request_id: int) -> None:
        del self.begun[request_id]


def loaded(drafter: Any, name: str, joins_late: bool) -> LoadedDrafter:
    target = TableModel.random(10, seed=1)
    target.capabilities = type(target.capabilities)(tree_attention=True, taps=range(5))
    return LoadedDrafter(drafter, target, name, joins_late=joins_late)


@dataclass
class Setup:
    wants: Wants = field(default_factory=Wants)
    head: Noted = field(default_factory=lambda: Noted(1, taps=(3,)))
    copy: Noted = field(default_factory=lambda: Noted(2))

    def __post_init__(self) -> None:
        drafters = [loaded(self.head, "head", False), loaded(self.copy, "copy", True)]
        self.policy = Policy(self.wants, drafters)
        self.requests = [
            Request(i, [5, 6, 7], 3, SamplingParams(seed=9), 9, self.policy) for i in range(3)
        ]

    def begin(self, *names: str | None) -> None:
        self.wants.first = dict(enumerate(names))
        for i, request in enumerate(self.requests):
            request.num_cached = 0
            drafting.begin(request, self.requests[:i])

    def step(self) -> list[Turn]:
        turns = [Turn(request, request.num_pending) for request in self.requests]
        drafting.allow(turns)
        drafting.propose(turns)
        return turns


def test_each_row_is_drafted_for_by_its_own() -> None:
    setup = Setup()
    setup.begin(None, "head", "head")
    assert [request.drafter for request in setup.requests] == [None, "head", "head"]
    setup.wants.next = {0: Allowance("copy", 2), 2: Allowance("copy", 1)}
    turns = setup.step()
    assert [turn.proposal.tree.tokens for turn in turns] == [(2, 2), (1, 1), (2,)]
    assert [(turn.drafter, turn.budget) for turn in turns] == [
        ("copy", 2),
        ("head", 2),
        ("copy", 1),
    ]
    assert setup.copy.begun == {0: (5, 6, 7), 2: (5, 6, 7)}
    assert setup.head.begun == {1: (5, 6, 7)}
    assert drafting.taps(turns) == [3]
    setup.wants.next[1] = Allowance(None)
    turns = setup.step()
    assert (setup.head.begun, drafting.taps(turns)) == ({}, [])
    assert setup.requests[1].drafter is None
    for request in setup.requests:
        drafting.end(request)
    assert not setup.copy.begun


def test_one_that_cannot_join_late_does_not() -> None:
    setup = Setup()
    setup.begin(None, None, None)
    setup.wants.next = {i: Allowance("head", 3) for i in range(3)}
    turns = setup.step()
    assert [(turn.drafter, turn.budget, len(turn.proposal.tree)) for turn in turns] == [
        (None, 0, 0)
    ] * 3, "it was not asked, and nobody may think that it drafted nothing"
    assert not setup.head.begun


class NotReady(Noted):
    """Cannot draft in the steps whose numbers it is given."""

    steps: Sequence[int] = ()
    number = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.number += 1
        drafts = super().propose(rows)
        return [NOT_READY] * len(rows) if self.number in self.steps else drafts


def test_one_that_can_never_draft_leaves_its_budget_to_others() -> None:
    head = NotReady(1)
    head.steps = range(1000)
    setup = Setup(head=head)
    setup.begin("head", None, None)
    drafters = [setup.step()[0].drafter for _ in range(10)]
    assert drafters == ["head"] * 8 + [None] * 2
    assert not head.begun
    assert "head" in setup.requests[0].excluded_drafters
    setup.wants.next[0] = Allowance("copy", 2)
    assert setup.step()[0].proposal.tree.tokens == (2, 2)


def test_drafters_see_no_seed() -> None:
    setup = Setup()
    setup.begin("head", "copy", "head")
    setup.step()
    assert {params.seed for params in (*setup.head.params, *setup.copy.params)} == {None}


def test_controllers_decide_for_their_own_rows_and_know_of_the_others() -> None:
    setup, other = Setup(), Setup()
    setup.requests[1].policy = other.policy
    setup.begin("head", None, "head")
    other.wants.next = {1: Allowance("copy", 4)}
    turns = setup.step()
    assert [turn.proposal.tree.tokens for turn in turns] == [(1, 1), (2, 2, 2, 2), (1, 1)]
    assert (setup.wants.others, other.wants.others) == ([1], [0, 2])
    assert (setup.copy.begun, other.copy.begun) == ({}, {1: (5, 6, 7)})


def test_a_drafter_sees_what_its_controller_says() -> None:
    setup = Setup()
    setup.begin("copy")
    setup.wants.next = {0: Allowance("copy", 2, (1.0, 1.5), token_share=0.3)}
    row = setup.step()[0].draft_row()
    assert (row.budget, row.prices, row.token_share) == (2, (1.0, 1.5), 0.3)


class Slow(Noted):
    """Takes as many seconds as its token says, by a clock that stands still otherwise."""

    now = 0.0

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        Slow.now += self.token
        return super().propose(rows)


def test_a_controller_is_told_the_times_of_its_own_drafters() -> None:
    """All drafters that people hand in have one name."""
    clock = lambda: Slow.now  # noqa: E731
    policies = [
        Policy(Wants(), [LoadedDrafter(Slow(token), TARGET, joins_late=True, clock=clock)])
        for token in (2, 5)
    ]
    engine = Engine(TARGET, policies[0], EngineOptions(clock=clock))
    for policy in policies:
        engine.submit([1], SamplingParams(speculation=OWN), policy=policy)
    engine.step()
    for policy, taken_ms in zip(policies, (2000.0, 5000.0), strict=True):
        (step,) = policy.controller.steps  # type: ignore[attr-defined]
        assert step.times.drafters[OWN].draft_ms == step.times.draft_ms == taken_ms


def test_the_times_of_a_drafter_of_two_policies_are_told_to_both() -> None:
    clock = lambda: Slow.now  # noqa: E731
    shared = LoadedDrafter(Slow(2), TARGET, joins_late=True, clock=clock)
    policies = [Policy(Wants(), [shared]) for _ in range(2)]
    engine = Engine(TARGET, policies[0], EngineOptions(clock=clock))
    for policy in policies:
        engine.submit([1], SamplingParams(speculation=OWN), policy=policy)
    engine.step()
    for policy in policies:
        (step,) = policy.controller.steps  # type: ignore[attr-defined]
        assert step.times.drafters[OWN].draft_ms == step.times.draft_ms == 2000.0


def test_what_there_is_no_room_for_is_not_asked() -> None:
    setup = Setup()
    params = SamplingParams(max_tokens=3)
    setup.requests = [
        Request(0, [5, 6, 7], 3, params, 9, setup.policy),
        Request(1, [5, 6, 7, 8], 3, params, 9, setup.policy),
        Request(2, [5], 1, SamplingParams(max_draft_tokens=1), 9, setup.policy),
    ]
    setup.begin("copy", "copy", "copy")
    setup.wants.next = {i: Allowance("copy", 50) for i in range(3)}
    assert [turn.budget for turn in setup.step()] == [2, 1, 1]


# ---- rules --------------------------------------------------------------------------------------


@dataclass
class Picky:
    """Forces a given chain, and bans token 9 everywhere and 3 behind 2."""

    chain: tuple[int, ...] = ()
    bans, filters_only, scale = True, False, None

    def law(self, logits_V: torch.Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
        return law_of(logits_V, SamplingParams())

    def permits(self, token: int, text: Sequence[int], drafted: Sequence[int] = ()) -> bool:
        return token != 9 and not (token == 3 and drafted and drafted[-1] == 2)

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        return self.chain

    def is_complete(self, text: Sequence[int]) -> bool:
        return False


@dataclass
class Inner(BaseDrafter):
    """Proposes one tree, and remembers that it was asked."""

    tree: TokenTree
    asked: list[int] = field(default_factory=list)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.asked += [row.request_id for row in rows]
        return [Proposal.chosen(self.tree) for _ in rows]


class Continuing(Inner):
    traits = DrafterTraits(continues=True)

    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal:
        self.asked.append(row.budget)
        return Proposal.chosen(self.tree)


TREE = TokenTree((2, 3, 4, 9, 5, 6), (ROOT, 0, 0, ROOT, 3, 2))


def drafts(
    inner: Inner, *chains: tuple[int, ...], budget: int = 6, num_forced: int = 6
) -> list[Proposal]:
    """Of rows whose rules force these chains."""
    wants = Wants()
    policy = Policy(wants, [loaded(inner, "x", True)])
    turns = list[Turn]()
    for number, chain in enumerate(chains):
        rules: Rules = Picky(chain)
        request = Request(number, [1, 2], 2, SamplingParams(), 0, policy, rules)
        wants.first[number] = "x"
        wants.next[number] = Allowance("x", budget, num_forced=num_forced)
        drafting.begin(request, [])
        turns.append(Turn(request, 2))
    drafting.allow(turns)
    drafting.propose(turns)
    assert all(len(turn.proposal.tree) <= turn.most_tokens - turn.num_read for turn in turns)
    return [turn.proposal for turn in turns]


def test_what_cannot_come_is_not_scored() -> None:
    (proposal,) = drafts(Inner(TREE), ())
    assert proposal.tree == TokenTree((2, 4, 6), (ROOT, 0, 1))


@pytest.mark.parametrize(
    ("chain", "tree", "expected", "asked"),
    [
        ((7, 8), TREE, (7, 8), []),  # known without asking
        ((7,), TokenTree(), (7,), [0]),  # for nothing, where the drafter has none
        ((7,), TokenTree.chain((7, 4)), (7, 4), [0]),
        ((), TokenTree.chain((4,)), (4,), [0]),
        ((1, 2, 4, 5, 6, 7, 8), TREE, (1, 2, 4, 5, 6, 7), []),  # no more than is allowed
    ],
)
def test_forced_tokens(
    chain: tuple[int, ...], tree: TokenTree, expected: tuple[int, ...], asked: list[int]
) -> None:
    inner = Inner(tree)
    (proposal,) = drafts(inner, chain)
    assert proposal.tree.tokens == expected
    assert inner.asked == asked


def test_forced_tokens_may_be_more_than_the_drafter_is_asked_for() -> None:
    inner = Inner(TREE)
    (proposal,) = drafts(inner, (1, 2, 4, 5, 6, 7, 8), budget=3, num_forced=100)
    assert proposal.tree.tokens == (1, 2, 4, 5, 6, 7, 8)
    assert inner.asked == []


def test_who_can_goes_on_behind_them() -> None:
    inner = Continuing(TokenTree((2, 3, 4, 9), (ROOT, 0, 0, ROOT)))
    (proposal,) = drafts(inner, (7, 2))
    assert inner.asked == [4]
    assert proposal.tree == TokenTree((7, 2, 2, 4), (ROOT, 0, 1, 2))


# ---- in an engine -------------------------------------------------------------------------------


def test_the_engine_goes_on_while_a_drafter_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(counting_model(), None, LoadOptions(drafter="none"))
    build, results = speculation.build_drafter, list[GenerationResult]()

    def slow(name: str, context: DrafterContext) -> Drafter:
        other = threading.Thread(target=lambda: results.extend(llm.generate([[1]])), daemon=True)
        other.start()
        other.join(timeout=60)  # for ever, if the engine waits for this drafter
        assert results, "the engine stands still"
        return build(name, context)

    monkeypatch.setattr(speculation, "build_drafter", slow)
    view = llm.with_drafter(LoadOptions(drafter="ngram"))
    assert view.generate([[1]])[0].token_ids == results[0].token_ids


def test_a_trace_sees_the_rows_of_its_own_requests() -> None:
    all_steps: list[StepRecord] = []
    own_steps: list[StepRecord] = []
    llm = LLM(counting_model(), None, LoadOptions(drafter="none"), trace=all_steps.append)
    view = llm.with_drafter(LoadOptions(drafter="ngram"), trace=own_steps.append)
    params = SamplingParams(max_tokens=9)
    theirs = llm.engine.submit([1], params)
    mine = view.engine.submit([2], params, policy=view.policy)
    drain(llm.engine)
    assert {row.request_id for step in own_steps for row in step.rows} == {mine}
    assert {row.request_id for step in all_steps for row in step.rows} == {mine, theirs}


def test_requests_that_stay_apart_run_in_steps_of_their_own() -> None:
    llm = LLM(counting_model(), None, LoadOptions(drafter="none"))
    views = [
        llm.with_drafter(LoadOptions(drafter=name), is_apart=True) for name in ("none", "ngram")
    ]
    params = SamplingParams(max_tokens=20)
    streams = [view.stream([first], params) for first, view in enumerate(views)]
    for _ in range(5):
        assert len(next(streams[0]).token_ids) == 1
    (result,) = llm.generate([[7]], params)  # a step of all others leaves them alone
    assert result.finish_reason == "length"
    assert len(next(streams[1]).token_ids) == 1, "it has not moved on"
    assert [len([*stream]) > 0 for stream in streams] == [True, True]
