"""A failure affects only its own request: committed tokens stay, the engine goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.control.base import Allowance, Row
from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import GrammarError, NonFiniteScoresError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import StepRecord
from foredraft.core.verify import Verdict
from foredraft.drafters.base import DraftRow
from foredraft.engine.engine import Engine
from foredraft.engine.turn import Turn
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel
from tests.engine.helpers import (
    LETTERS,
    FaultyTarget,
    ScriptedDrafter,
    counting_drafter,
    counting_model,
    drain,
    engine_of,
    generate,
    letters,
    new_engine,
)

PARAMS = SamplingParams(max_tokens=12)


def faulty_target() -> FaultyTarget:
    """Counts upwards, like `counting_model`."""
    return FaultyTarget(len(LETTERS), counting_model().probs)


def plain(prompt: list[int], params: SamplingParams = PARAMS) -> tuple[int, ...]:
    return generate(new_engine(counting_model()), [prompt], params)[0].token_ids


def test_a_row_without_finite_logits_ends_alone() -> None:
    target = faulty_target()
    target.nan_after = (7, 7)
    engine = new_engine(target, counting_drafter(wrong_every=3))
    broken, fine = generate(engine, [[7, 7], [1]], PARAMS)
    assert (broken.finish_reason, broken.token_ids) == ("error", ())
    assert broken.error is not None
    assert "largest of 10 logits is nan" in broken.error
    assert (fine.finish_reason, fine.token_ids, fine.error) == ("length", plain([1]), None)
    assert target.cache.slots == []


@pytest.mark.parametrize("num_draft_tokens", [0, 2, 7])
def test_a_row_that_loses_its_logits_midway_keeps_its_tokens(num_draft_tokens: int) -> None:
    target = faulty_target()
    target.nan_after = (4, 5)
    engine = new_engine(target, counting_drafter(), num_draft_tokens=num_draft_tokens)
    broken, fine = generate(engine, [[1], [5]], PARAMS)
    assert (broken.finish_reason, broken.token_ids, broken.text) == ("error", (2, 3, 4, 5), "cdef")
    assert fine.token_ids == plain([5])[: len(fine.token_ids)]
    assert target.cache.slots == []


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 6])
def test_drawn_drafts_lose_nothing_to_a_node_without_logits(num_draft_tokens: int) -> None:
    """Rules for drawn drafts look at every node; one that is not reached must cost nothing."""

    def draw(row: DraftRow) -> Proposal:
        draft, parent = row.draft(), -1
        for depth in range(row.budget):
            likeliest = (row.tokens[-1] + 1 + depth) % len(LETTERS)
            (parent,) = draft.extend(parent, torch.eye(len(LETTERS))[likeliest] * 3)
        return draft.build()

    params = SamplingParams(temperature=1.0, coupling="drawn", max_tokens=12)
    ends = []
    for seed in range(40):
        target = faulty_target()
        target.nan_after = (4, 5)
        engine = new_engine(target, ScriptedDrafter(draw), num_draft_tokens=num_draft_tokens)
        (result,) = generate(engine, [[1]], replace(params, seed=seed))
        text = (1, *result.token_ids)
        reached = [i for i in range(1, len(text)) if text[i - 1 : i + 1] == (4, 5)]
        if result.finish_reason == "error":
            assert reached == [len(text) - 1], "it ends where plain decoding would, and keeps all"
        else:
            assert not reached or reached[0] == len(text) - 1
        ends.append(result.finish_reason)
    assert {"error", "length"} == set(ends)


@pytest.mark.parametrize("raise_at", [1, 3])
def test_a_target_that_raises_ends_the_running_request_and_no_other(raise_at: int) -> None:
    target = faulty_target()
    target.raise_at = raise_at
    engine = new_engine(target, counting_drafter(), num_draft_tokens=2, max_batch_size=1)
    first, waiting = generate(engine, [[1], [3]], PARAMS)
    assert first.finish_reason == "error"
    assert first.error == "RuntimeError: device lost"
    assert first.token_ids == plain([1])[: 3 * (raise_at - 1)]
    assert (waiting.finish_reason, waiting.token_ids) == ("length", plain([3]))
    assert target.cache.slots == []


@pytest.mark.parametrize(
    ("error", "is_found"),
    [
        (RuntimeError("device lost"), False),
        (NonFiniteScoresError("the largest logit is nan"), False),
        (GrammarError("the reply does not follow its grammar"), True),
    ],
)
def test_only_what_may_be_spoilt_is_read_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_found: bool
) -> None:
    """An error of a request's own rules says nothing against entries that others share."""
    target = counting_model()
    engine, prompt = new_engine(target), [i % len(LETTERS) for i in range(40)]
    generate(engine, [prompt], PARAMS)

    with monkeypatch.context() as patch:
        patch.setattr(Turn, "_verdict", lambda turn, scores: Verdict.failed((), error))
        (failed,) = generate(engine, [[1]], PARAMS)
    assert failed.finish_reason == "error"
    (later,) = generate(engine, [prompt], PARAMS)
    assert (later.num_cached_tokens > 0) is is_found
    assert later.token_ids == plain(prompt)


@pytest.mark.parametrize("raise_at", [1, 3])
def test_a_forward_of_several_rows_that_fails_is_tried_row_by_row(raise_at: int) -> None:
    target = faulty_target()
    target.raise_at = raise_at
    engine = new_engine(target, counting_drafter(), num_draft_tokens=2)
    for result, prompt in zip(generate(engine, [[1], [5]], PARAMS), ([1], [5]), strict=True):
        assert (result.finish_reason, result.token_ids) == ("length", plain(prompt))


@pytest.mark.parametrize("most", [1, 2])
def test_a_request_without_memory_for_its_cache_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    target = counting_model()
    allocate = target.cache.allocate

    def allocate_few() -> int:
        if len(target.cache.slots) >= most:
            raise MemoryError("no room for another slot")
        return allocate()

    monkeypatch.setattr(target.cache, "allocate", allocate_few)
    engine = new_engine(target, counting_drafter(wrong_every=3), max_batch_size=3)
    prompts = [[1], [5], [3]]
    assert [r.token_ids for r in generate(engine, prompts, PARAMS)] == [plain(p) for p in prompts]
    assert target.cache.slots == []


Allow = Callable[[Sequence[Row], Sequence[Row]], Any]


def _allowing(number: int) -> Allow:
    return lambda rows, others: [Allowance(row.drafter, number) for row in rows]


def _lost(rows: Sequence[Row], others: Sequence[Row]) -> list[Allowance]:
    raise ZeroDivisionError("no rows accepted")


@pytest.mark.parametrize(
    ("allow", "complaint"),
    [
        (_lost, "failed to allow anything: no rows accepted"),
        (lambda rows, others: [], "failed to allow anything: 0 allowances for 2 rows"),
        (
            lambda rows, others: [Allowance()] * 3,
            "failed to allow anything: 3 allowances for 2 rows",
        ),
        (lambda rows, others: None, "failed to allow anything"),
        (
            lambda rows, others: [Allowance("who", 2) for _ in rows],
            "failed to allow anything: no drafter 'who' is loaded, only ['own']",
        ),
        (_allowing(50), ""),
        (_allowing(-3), ""),
    ],
)
def test_a_controller_that_allows_nonsense_costs_nobody_anything(
    allow: Allow,
    complaint: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More than the context holds, less than nothing, for too many rows, or an exception."""
    target = TableModel(len(LETTERS), counting_model().probs, max_context=20)
    controller = FixedBudget(4)
    controller.allow = allow  # type: ignore[method-assign, assignment]
    engine = engine_of(target, counting_drafter(), controller, new_decoder=letters)
    results = generate(engine, [[1], [2]], SamplingParams(max_tokens=30))
    assert [(r.finish_reason, len(r.token_ids)) for r in results] == [("length", 19)] * 2
    assert complaint in caplog.text


def test_a_trace_that_fails_is_switched_off_and_said(caplog: pytest.LogCaptureFixture) -> None:
    told: list[StepRecord] = []

    def trace(record: StepRecord) -> None:
        told.append(record)
        raise OSError("disk full")

    (result,) = generate(new_engine(counting_model(), trace=trace), [[1]], PARAMS)
    assert (result.finish_reason, result.token_ids) == ("length", plain([1]))
    assert len(told) == 1
    assert "disk full" in caplog.text
    assert "Traceback" in caplog.text


def test_a_row_whose_text_cannot_be_decoded_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    def new_decoder(_: Sequence[int]) -> Callable[[int], str]:
        return {i: letter for i, letter in enumerate(LETTERS) if i != 7}.__getitem__

    engine = new_engine(counting_model(), counting_drafter(), new_decoder=new_decoder)
    broken, fine = generate(engine, [[5], [8]], SamplingParams(max_tokens=6))
    assert (broken.finish_reason, broken.token_ids, broken.text) == ("error", (6, 7), "g")
    assert (fine.finish_reason, fine.text) == ("length", "jabcde")
    assert "Traceback" in caplog.text


def test_a_row_that_makes_the_forward_fail_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Such as one for which no memory is left."""

    class Greedy(TableModel):
        def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
            if any(row.pending[0] == 6 for row in rows):
                raise MemoryError("no room for entry 6")
            return super().score(rows, taps)

    target = Greedy(len(LETTERS), counting_model().probs)
    engine = new_engine(target, counting_drafter(), num_draft_tokens=0)
    broken, fine = generate(engine, [[4], [8]], SamplingParams(max_tokens=5))
    assert (broken.finish_reason, broken.token_ids) == ("error", (5, 6))
    assert broken.error == "MemoryError: no room for entry 6"
    assert (fine.finish_reason, fine.token_ids) == ("length", (9, 0, 1, 2, 3))
    assert "Traceback" in caplog.text
    assert target.cache.slots == []


class Interrupted(BaseException):
    """Like KeyboardInterrupt, without stopping pytest."""


def _interrupt(*args: object) -> int:
    raise Interrupted


def interrupt(engine: Engine, owner: object, call: str) -> None:
    """A step that is interrupted in a call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, call, _interrupt)
        with pytest.raises(Interrupted):
            engine.step()


def test_an_interrupted_step_never_gives_wrong_text() -> None:
    """Between its commit and its cache a row is out of step: it may end, but not go on."""
    target = counting_model()
    engine = new_engine(target)
    engine.submit([1], PARAMS)
    engine.step()
    interrupt(engine, target.cache, "keep")
    (event,) = engine.step()
    assert event.result is not None
    assert event.result.finish_reason == "error"
    assert event.result.token_ids == plain([1])[:2]
    assert "an earlier step was interrupted" in str(event.result.error)
    assert target.cache.slots == []


class Forgetting(FixedBudget):
    """Remembers which requests are over, and may fail at it."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(3)
        self.ended: list[int] = []
        self._fails = fails

    def end(self, request_id: int) -> None:
        self.ended.append(request_id)
        if self._fails:
            raise RuntimeError("lost")


def test_the_controller_hears_of_every_end() -> None:
    controller = Forgetting()
    engine = engine_of(counting_model(), counting_drafter(), controller, max_batch_size=2)
    ran, stopped, waited = (engine.submit([i], PARAMS) for i in (1, 2, 3))
    engine.step()
    engine.cancel(waited)
    engine.cancel(stopped)
    assert controller.ended == [waited, stopped]
    drain(engine)
    assert controller.ended == [waited, stopped, ran]


def test_a_row_that_cannot_be_committed_costs_no_other_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine(counting_model(), counting_drafter())
    first, second, third = (engine.submit([number], PARAMS) for number in (1, 2, 5))
    engine.step()
    commit = Turn.commit

    def fail(turn: Turn) -> None:
        if turn.request_id == second:
            raise MemoryError("of one row")
        commit(turn)

    monkeypatch.setattr(Turn, "commit", fail)
    results = drain(engine)
    assert results[second].finish_reason == "error"
    assert [results[i].token_ids for i in (first, third)] == [plain([1]), plain([5])]


def test_records_keep_no_request_and_no_draft_distribution() -> None:
    steps: list[StepRecord] = []
    target = counting_model()

    def script(row: DraftRow) -> Proposal:
        draft = row.draft()
        for node in range(row.budget):
            draft.extend(node - 1, torch.zeros(len(LETTERS)))
        return draft.build()

    engine = new_engine(target, ScriptedDrafter(script), trace=steps.append)
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=12, coupling="drawn")
    engine.submit([1], params)
    request = weakref.ref(engine._scheduler.next_waiting())  # type: ignore[arg-type]
    drain(engine)
    gc.collect()
    assert request() is None
    rows = [row for step in steps for row in step.rows if len(row.proposal.tree)]
    assert rows
    assert all(row.proposal.is_drawn for row in rows)
    assert not sum(row.proposal.draft_probs_NV.numel() for row in rows)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        rows[0].budget = 3  # type: ignore[misc]
