"""Several readers on one engine: each sees the events of its own requests, and all of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from foredraft.core.errors import PromptError
from foredraft.core.params import SamplingParams
from foredraft.engine.request import Event
from tests.engine.helpers import counting_drafter, counting_model, generate, new_engine

PARAMS = SamplingParams(max_tokens=20)


def text_of(events: list[Event]) -> str:
    return "".join(piece.text for event in events for piece in event.pieces)


def last_of(events: list[Event]) -> Event:
    assert events[-1].result is not None
    assert all(event.result is None for event in events[:-1])
    assert text_of(events) == events[-1].result.text
    return events[-1]


def test_streams_read_in_turns_lose_nothing() -> None:
    engine = new_engine(counting_model(), counting_drafter(wrong_every=3))
    first, second = engine.stream([[1]], PARAMS), engine.stream([[5]], PARAMS)
    seen: tuple[list[Event], list[Event]] = ([], [])
    for one, other in itertools.zip_longest(first, second):
        seen[0].extend([one] if one else [])
        seen[1].extend([other] if other else [])
    for events, prompt in zip(seen, ([1], [5]), strict=True):
        result = last_of(events).result
        expected = generate(new_engine(counting_model()), [prompt], PARAMS)[0]
        assert result is not None
        assert result.token_ids == expected.token_ids


def test_one_reader_may_run_to_the_end_before_another_goes_on() -> None:
    engine = new_engine(counting_model())
    first = engine.stream([[1]], PARAMS)
    begun = next(first)
    others = list(engine.stream([[5], [6]], PARAMS))
    assert sum(event.result is not None for event in others) == 2
    last_of([begun, *first])


def test_closing_a_stream_cancels_its_request_only() -> None:
    target = counting_model()
    engine = new_engine(target)
    first, second = engine.stream([[1], [2]], PARAMS), engine.stream([[5]], PARAMS)
    next(first)
    begun = next(second)
    close(first)
    assert len(target.cache.slots) == 1
    last_of([begun, *second])
    assert target.cache.slots == []
    assert not engine.has_work


def close(stream: Iterator[Event]) -> None:
    stream.close()  # type: ignore[attr-defined]


def test_a_stream_that_nobody_reads_submits_nothing() -> None:
    engine = new_engine(counting_model())
    stream = engine.stream([[1]], PARAMS)
    assert not engine.has_work
    close(stream)
    assert not engine.has_work


def test_one_bad_prompt_and_nothing_is_generated() -> None:
    target = counting_model()
    engine = new_engine(target)
    with pytest.raises(PromptError):
        list(engine.stream([[1], [2], []], PARAMS))
    assert not engine.has_work
    assert target.cache.slots == []


def test_a_request_cancelled_behind_its_stream_ends_it() -> None:
    engine = new_engine(counting_model())
    stream = engine.stream([[1]], PARAMS)
    begun = next(stream)
    engine.cancel(begun.request_id)
    result = last_of([begun, *stream]).result
    assert result is not None
    assert result.finish_reason == "cancelled"


def test_no_prompts_no_events() -> None:
    assert list(new_engine(counting_model()).stream([], PARAMS)) == []


def test_preparing_a_request_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may take seconds to compile."""
    engine = new_engine(counting_model())
    prepare = engine.prepare

    def while_another_steps(*args: Any, **options: Any) -> Any:
        other = threading.Thread(target=engine.step)
        other.start()
        other.join(10)
        assert not other.is_alive()
        return prepare(*args, **options)

    monkeypatch.setattr(engine, "prepare", while_another_steps)
    last_of(list(engine.stream([[1]], PARAMS)))
