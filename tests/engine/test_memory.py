"""Too little memory for all requests: waiting, preemption, and unchanged texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import pytest

from foredraft.core.errors import CacheFullError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import StepRecord
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.engine.slots import HEADROOM
from tests.engine.helpers import (
    counting_drafter,
    counting_model,
    drain,
    generate,
    limited,
    new_engine,
)

PARAMS = SamplingParams(temperature=1.0, seed=9, max_tokens=150)
PROMPTS = [[i, 2, 3] for i in range(6)]


def alone(prompt: list[int], params: SamplingParams = PARAMS) -> tuple[int, ...]:
    return generate(new_engine(counting_model()), [prompt], params)[0].token_ids


@pytest.mark.parametrize("num_tokens", [160, 200, 333, 1000])
@pytest.mark.parametrize("drafter", [None, NgramDrafter(min_ngram_size=1), counting_drafter(3)])
def test_texts_are_the_same_with_little_memory(num_tokens: int, drafter: Drafter | None) -> None:
    target = limited(counting_model(), num_tokens)
    engine = new_engine(target, drafter)
    results = generate(engine, PROMPTS, PARAMS)
    assert [result.token_ids for result in results] == [alone(prompt) for prompt in PROMPTS]
    assert target.cache.slots == []
    # They begin with 67 tokens each and want 153 in the end.
    assert (engine.stats().preemptions > 0) == (134 <= num_tokens < 1000)


def test_the_last_to_come_gives_way_and_the_first_is_never_held_up() -> None:
    engine = new_engine(limited(counting_model(), 160))
    steps: dict[int, int] = {}
    for prompt in PROMPTS:
        engine.submit(prompt, PARAMS)
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        for event in engine.step():
            if event.result is not None:
                steps[event.request_id] = num_steps
    assert list(steps) == sorted(steps)
    assert steps[0] == PARAMS.max_tokens


def test_drafts_give_way_before_any_row_does() -> None:
    """Two rows of 71 tokens each fit, their drafts beside them do not."""
    params = SamplingParams(max_tokens=70)
    target = limited(counting_model(), 2 * 71)
    engine = new_engine(target, counting_drafter())
    first, second = generate(engine, [[1], [5]], params)
    assert (first.token_ids, second.token_ids) == (alone([1], params), alone([5], params))
    assert engine.stats().preemptions == 0
    assert first.stats.drafted > 0


def test_what_never_fits_ends_by_name_and_keeps_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = limited(counting_model(), 100)
    engine = new_engine(target)
    (long,) = generate(engine, [[1] * 50], PARAMS)
    assert (long.finish_reason, long.token_ids) == ("error", ())
    assert long.error is not None
    assert long.error.startswith("CacheFullError: the cache has no room for 114 more tokens: 0 of")
    assert "wait" not in long.error, "it would be in vain"
    assert caplog.records[-1].exc_info is None, "nothing is broken"
    (grown,) = generate(engine, [[1]], PARAMS)
    assert grown.finish_reason == "error"
    assert grown.token_ids == alone([1])[: len(grown.token_ids)]
    assert len(grown.token_ids) == 100
    (fits,) = generate(engine, [[1]], SamplingParams(max_tokens=99))
    assert fits.finish_reason == "length"


def test_one_that_does_not_fit_now_lets_nobody_pass() -> None:
    engine = new_engine(limited(counting_model(), 160))
    first = engine.submit([1], SamplingParams(max_tokens=99))
    engine.step()
    large = engine.submit([2] * 100, SamplingParams(max_tokens=5))
    small = engine.submit([3], SamplingParams(max_tokens=5))
    ended = [event.request_id for event in engine.run() if event.result is not None]
    assert ended == [first, large, small]


class Recorder(BaseDrafter):
    """Records its calls."""

    def __init__(self, fails_in: int | None = None) -> None:
        self.told: list[tuple[str, int]] = []
        self._fails_in = fails_in

    def begin(self, row: DraftRow) -> None:
        self.told.append(("begin", row.request_id))
        assert row.num_cached == 0

    def end(self, request_id: int) -> None:
        self.told.append(("end", request_id))

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.told += [("propose", row.request_id) for row in rows]
        if any(row.request_id == self._fails_in for row in rows):
            raise ValueError("no idea")
        return counting_drafter().propose(rows)


def test_a_drafter_hears_of_it_and_a_failed_one_is_not_asked_again() -> None:
    drafter = Recorder()
    engine = new_engine(limited(counting_model(), 160), drafter)
    assert len(generate(engine, PROMPTS[:2], PARAMS)) == 2
    second = [what for what, number in drafter.told if number == 1 and what != "propose"]
    assert second == ["begin", "end", "begin", "end"]
    failing = Recorder(fails_in=1)
    engine = new_engine(limited(counting_model(), 160), failing)
    generate(engine, PROMPTS[:2], PARAMS)
    assert engine.stats().preemptions > 0
    assert [what for what, number in failing.told if number == 1].count("begin") == 1


def test_steps_tell_how_many_gave_way_for_them() -> None:
    steps: list[StepRecord] = []
    engine = new_engine(limited(counting_model(), 160), trace=steps.append)
    generate(engine, PROMPTS, PARAMS)
    preempted = [step.num_preempted for step in steps]
    assert sum(preempted) == engine.stats().preemptions > 0
    for step, before in zip(steps[1:], steps, strict=False):
        if step.num_preempted:
            assert len(step.rows) < len(before.rows)


def test_aborted_while_it_waits_for_memory() -> None:
    target = limited(counting_model(), 160)
    engine = new_engine(target)
    first, second = (engine.submit(prompt, PARAMS) for prompt in PROMPTS[:2])
    while not engine.stats().preemptions:
        engine.step()
    cancelled = engine.cancel(second)
    assert cancelled is not None
    assert cancelled.token_ids == alone(PROMPTS[1])[: len(cancelled.token_ids)]
    assert len(cancelled.token_ids) > 50
    assert drain(engine)[first].token_ids == alone(PROMPTS[0])
    assert target.cache.slots == []


def test_a_higher_priority_goes_first_and_nobody_waits_for_ever() -> None:
    engine = new_engine(counting_model(), max_batch_size=1)
    params = SamplingParams(max_tokens=20)
    running = engine.submit([1], params)
    engine.step()
    plain, urgent = engine.submit([2], params), engine.submit([3], params, priority=1)
    ended = [event.request_id for event in engine.run() if event.result is not None]
    assert ended == [running, urgent, plain]
    low = engine.submit([4], params)
    for _ in range(1200):  # urgent requests without end
        if not engine.is_live(low):
            break
        while engine.stats().waiting < 3:
            engine.submit([5], replace(params, max_tokens=1), priority=1)
        engine.step()
    assert not engine.is_live(low)


def test_prompts_get_on_however_many_rows_decode() -> None:
    engine = new_engine(counting_model(), max_batch_size=40, max_step_tokens=16)
    for _ in range(30):
        engine.submit([1], SamplingParams(max_tokens=200))
    engine.step()
    late = engine.submit([2] * 20, SamplingParams(max_tokens=1))
    for _ in range(10):
        engine.step()
    assert not engine.is_live(late)


def test_headroom_is_no_more_than_the_reply_may_hold() -> None:
    assert HEADROOM == 64
    engine = new_engine(limited(counting_model(), 12))
    (result,) = generate(engine, [[1] * 10], SamplingParams(max_tokens=2))
    assert result.finish_reason == "length"


def test_cancelling_one_that_never_ran_makes_no_room() -> None:
    """After a refusal of memory no row is admitted until another has ended."""
    engine = new_engine(limited(counting_model(), 160))
    first, second = (engine.submit(prompt, PARAMS) for prompt in PROMPTS[:2])
    while not engine.stats().preemptions:
        engine.step()
    engine.cancel(engine.submit([1], PARAMS))
    engine.step()
    assert engine.stats().waiting == 1, "the row that gave way does not come straight back"
    results = drain(engine)
    assert [results[number].token_ids for number in (first, second)] == [*map(alone, PROMPTS[:2])]


def test_many_rows_give_way_without_a_call_inside_each_other() -> None:
    depths: list[int] = []

    def deep(frame: FrameType | None) -> int:
        return 0 if frame is None else 1 + deep(frame.f_back)

    target = limited(counting_model(), 10_000)
    engine = new_engine(target, max_batch_size=120, prefix_caching=False)
    for number in range(120):
        engine.submit([1, number % 9], SamplingParams(max_tokens=4))
    engine.step()
    reserve = target.cache.reserve

    def refuse(slot: int, num_tokens: int) -> None:
        depths.append(deep(sys._getframe()))
        if len(target.cache.slots) > 2:
            raise CacheFullError("none is left")
        reserve(slot, num_tokens)

    target.cache.reserve = refuse  # type: ignore[method-assign]
    engine.step()
    assert engine.stats().preemptions == 118
    assert max(depths) < min(depths) + 5
    target.cache.reserve = reserve  # type: ignore[method-assign]
    assert len(drain(engine)) == 120
