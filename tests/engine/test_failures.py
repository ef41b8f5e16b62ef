"""What goes wrong in one place costs that place only: committed tokens stay, the engine goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.core.request import Request
from foredraft.engine.engine import Engine
from foredraft.engine.row import Session
from tests.engine.helpers import (
    LETTERS,
    FaultyTarget,
    counting_drafter,
    counting_model,
    finish,
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
    assert target.cache.entries == {}


def test_a_row_that_loses_its_logits_midway_keeps_its_tokens() -> None:
    target = faulty_target()
    target.nan_after = (4, 5)
    engine = new_engine(target, num_draft_tokens=0)
    broken, fine = generate(engine, [[1], [5]], PARAMS)
    assert (broken.finish_reason, broken.token_ids, broken.text) == ("error", (2, 3, 4, 5), "cdef")
    assert fine.token_ids == plain([5])[: len(fine.token_ids)]
    assert target.cache.entries == {}


@pytest.mark.parametrize("raise_at", [1, 3])
def test_a_target_that_raises_ends_the_running_requests_and_no_others(raise_at: int) -> None:
    target = faulty_target()
    target.raise_at = raise_at
    engine = new_engine(target, counting_drafter(), num_draft_tokens=2, max_batch_size=2)
    first, second, waiting = generate(engine, [[1], [5], [3]], PARAMS)
    for result, prompt in ((first, [1]), (second, [5])):
        assert result.finish_reason == "error"
        assert result.error == "RuntimeError: device lost"
        assert result.token_ids == plain(prompt)[: 3 * (raise_at - 1)]
    assert (waiting.finish_reason, waiting.token_ids) == ("length", plain([3]))
    assert target.cache.entries == {}


def test_held_back_text_comes_out_when_a_request_fails() -> None:
    target = faulty_target()
    target.raise_at = 3
    params = SamplingParams(max_tokens=12, stop="defg")
    (result,) = generate(new_engine(target), [[2]], params)
    assert (result.finish_reason, result.text) == ("error", "de")


def test_a_request_without_memory_for_its_cache_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = counting_model()
    allocate = target.cache.allocate

    def allocate_two() -> int:
        if len(target.cache.entries) >= 2:
            raise MemoryError("no room for another slot")
        return allocate()

    monkeypatch.setattr(target.cache, "allocate", allocate_two)
    engine = new_engine(target, counting_drafter(wrong_every=3), max_batch_size=3)
    first, second, third = generate(engine, [[1], [5], [3]], PARAMS)
    assert (first.token_ids, second.token_ids) == (plain([1]), plain([5]))
    assert (third.finish_reason, third.token_ids) == ("error", ())
    assert third.error == "MemoryError: no room for another slot"
    assert target.cache.entries == {}


def test_the_engine_stays_usable_when_every_new_request_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = counting_model()
    engine = new_engine(target)
    with monkeypatch.context() as patch:
        patch.setattr(target.cache, "allocate", lambda: 1 // 0)
        (failed,) = generate(engine, [[1]], PARAMS)
    assert failed.finish_reason == "error"
    assert generate(engine, [[1]], PARAMS)[0].token_ids == plain([1])


def test_a_session_reads_everything_again_after_an_error() -> None:
    target, session = faulty_target(), Session()
    engine = new_engine(target)
    target.raise_at = 3
    request_id = engine.submit([1], PARAMS, session)
    failed = finish(engine)[request_id]
    assert (failed.finish_reason, failed.token_ids) == ("error", (2, 3))
    prompt = [1, *failed.token_ids, 7]
    request_id = engine.submit(prompt, PARAMS, session)
    assert finish(engine)[request_id].token_ids == plain(prompt)
    engine.close_session(session)
    assert target.cache.entries == {}


class RaisingController(FixedBudget):
    """Raises after a step was committed, when its events are not out yet."""

    observed = 0

    def observe(self, rows: Sequence[Request]) -> None:
        self.observed += 1
        if self.observed == 2:
            raise ZeroDivisionError("no rows accepted")


def test_tokens_committed_by_a_step_that_fails_later_are_in_events_and_result() -> None:
    target = counting_model()
    controller = RaisingController(4, target.max_context)
    engine = Engine(target, counting_drafter(), controller, new_decoder=letters)
    (result,) = generate(engine, [[1]], PARAMS)  # which compares events and result
    assert (result.finish_reason, result.token_ids) == ("error", plain([1])[:10])
    assert target.cache.entries == {}


def test_a_request_that_was_complete_when_its_step_failed_is_complete() -> None:
    target = counting_model()
    controller = RaisingController(4, target.max_context)
    engine = Engine(target, counting_drafter(), controller, new_decoder=letters)
    (result,) = generate(engine, [[1]], SamplingParams(max_tokens=10))
    assert (result.finish_reason, result.error, result.token_ids) == (
        "length",
        None,
        plain([1])[:10],
    )


class Interrupted(BaseException):
    """Like KeyboardInterrupt, without stopping pytest."""


def test_an_interrupted_step_never_gives_wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its commit and its cache a row is out of step: it may end, but not go on."""
    target = counting_model()
    engine = new_engine(target)
    engine.submit([1], PARAMS)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(target.cache, "keep", _interrupt)
        with pytest.raises(Interrupted):
            engine.step()
    (event,) = engine.step()
    assert event.result is not None
    assert event.result.finish_reason == "error"
    assert event.result.token_ids == plain([1])[:2]
    assert "an earlier step was interrupted" in str(event.result.error)
    assert target.cache.entries == {}


def test_a_request_interrupted_before_its_first_step_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = counting_model()
    engine = new_engine(target)
    request_id = engine.submit([1], PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(target.cache, "allocate", _interrupt)
        with pytest.raises(Interrupted):
            engine.step()
    assert finish(engine)[request_id].token_ids == plain([1])


def _interrupt(*args: object) -> int:
    raise Interrupted


def test_a_session_interrupted_in_its_step_can_be_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, session = counting_model(), Session()
    engine = new_engine(target, counting_drafter(wrong_every=3))
    request_id = engine.submit([1], PARAMS, session)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(target.cache, "keep", _interrupt)
        with pytest.raises(Interrupted):
            engine.step()
    cancelled = engine.cancel(request_id)
    assert cancelled is not None
    prompt = [1, *cancelled.token_ids]
    request_id = engine.submit(prompt, PARAMS, session)
    assert finish(engine)[request_id].token_ids == plain(prompt)
