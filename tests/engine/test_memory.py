"""Too little memory for all requests: waiting, preemption, and unchanged texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.drafters.base import Drafter
from foredraft.drafters.text.ngram import NgramDrafter
from tests.engine.helpers import (
    counting_drafter,
    counting_model,
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


def test_steps_tell_how_many_gave_way_for_them() -> None:
    steps: list[StepRecord] = []
    engine = new_engine(limited(counting_model(), 160), trace=steps.append)
    generate(engine, PROMPTS, PARAMS)
    preempted = [step.num_preempted for step in steps]
    assert sum(preempted) == engine.stats().preemptions > 0
    for step, before in zip(steps[1:], steps, strict=False):
        if step.num_preempted:
            assert len(step.rows) < len(before.rows)


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
        if not engine._scheduler.find(low):
            break
        while engine.stats().waiting < 3:
            engine.submit([5], replace(params, max_tokens=1), priority=1)
        engine.step()
    assert not engine._scheduler.find(low)
