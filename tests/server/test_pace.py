"""Paced streams: one token an event, evenly, and the same text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from foredraft.engine.request import Event
from foredraft.engine.text import Piece
from foredraft.server.pace import Paced, by_token
from tests.server.events import data_of

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "one two three one two three one two"}],
    "temperature": 0,
    "max_tokens": 60,
    "stream": True,
    "stream_options": {"include_usage": True},
}
PATH = "/v1/chat/completions"


class Clock:
    """Stands still but for those who sleep, and for steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        for _ in range(3):  # others have their turn
            await asyncio.sleep(0)
        self.now += seconds


def event_of(*tokens: int) -> Event:
    return Event(0, tokens, len(tokens) - 1, tuple(Piece(f"{t} ", True) for t in tokens))


def handed_out(
    source: Callable[[Clock], AsyncIterator[tuple[int, Event]]], clock_type: type[Clock] = Clock
) -> list[Any]:
    """Tokens with the times at which they came."""

    async def read() -> list[Any]:
        clock = clock_type()
        paced = Paced(source(clock), clock, clock.sleep)
        found = []
        try:
            while True:
                _, event = await anext(paced)
                found.append((event.token_ids, clock.now))
        except StopAsyncIteration:
            return found
        finally:
            await paced.aclose()

    return asyncio.run(read())


class LateClock(Clock):
    """A sleep ends late."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + (0.003 if seconds > 0.0 else 0.0))


def test_who_wakes_up_late_does_not_fall_behind() -> None:
    async def steps(clock: Clock) -> AsyncIterator[tuple[int, Event]]:
        for number in range(60):
            while clock.now < 0.03 * number:
                before = clock.now
                await Clock().sleep(0.0)
                clock.now += 0.001 * (clock.now == before)
            yield 0, event_of(*range(6))

    (*_, (_, ended)) = handed_out(steps, LateClock)
    assert ended < 0.03 * 59 + 2 * 0.03


def test_tokens_of_a_step_come_one_by_one_at_the_mean_pace() -> None:
    sizes = [1, 5, 1, 1, 8, 1, 3, 1, 1, 6] * 4

    async def steps(clock: Clock) -> AsyncIterator[tuple[int, Event]]:
        for number, size in enumerate(sizes):
            until = 0.1 * number
            while clock.now < until:
                await clock.sleep(0.01)
            yield 0, event_of(*range(size))

    found = handed_out(steps)
    assert all(len(ids) == 1 for ids, _ in found)
    assert len(found) == sum(sizes)
    times = [time for _, time in found]
    gaps = [after - before for before, after in pairwise(times[20:])]
    mean = 0.1 * len(sizes) / sum(sizes)
    assert max(gaps) < 4 * mean
    assert times[-1] < 0.1 * len(sizes) + 16 * mean


def test_what_ends_a_stream_comes_behind_its_tokens() -> None:
    async def broken(clock: Clock) -> AsyncIterator[tuple[int, Event]]:
        yield 0, event_of(1, 2, 3)
        raise ValueError("the reply failed")

    async def read() -> None:
        paced = Paced(broken(Clock()))
        assert [(await anext(paced))[1].token_ids for _ in range(3)] == [(1,), (2,), (3,)]
        with pytest.raises(ValueError, match="the reply failed"):
            await anext(paced)
        await paced.aclose()

    asyncio.run(read())


def test_an_event_is_split_with_nothing_lost() -> None:
    event = Event(0, (1, 2, 3), 2, (Piece("a", True), Piece("b", False)), num_drafted=4)
    parts = by_token(event)
    assert [part.token_ids for part in parts] == [(1,), (2,), (3,)]
    assert [piece for part in parts for piece in part.pieces] == [*event.pieces]
    assert (sum(p.num_accepted for p in parts), sum(p.num_drafted for p in parts)) == (2, 4)
    assert by_token(event_of(1)) == [event_of(1)]


def test_a_paced_stream_says_the_same_a_token_an_event(client: httpx.Client) -> None:
    def chunks(**more: Any) -> list[Any]:
        return data_of(client.post(PATH, json=BODY | more))[:-1]

    def text(found: list[Any]) -> str:
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in found if c["choices"])

    usual, paced = chunks(), chunks(paced_stream=True)
    assert text(paced) == text(usual)
    counts = [each[-1]["usage"]["completion_tokens"] for each in (usual, paced)]
    assert counts == [60, 60]
    assert len(paced) > len(usual) + 5  # many tokens of this tiny model are parts of characters
    refused = client.post(PATH, json=BODY | {"paced_stream": True, "stream": False})
    assert refused.status_code == 400


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_dialects_are_paced_likewise(client: httpx.Client, path: str) -> None:
    body = {"stream": True, "paced_stream": True, "temperature": 0}
    if path == "/v1/messages":
        body |= {"messages": BODY["messages"], "max_tokens": 40}
    else:
        body |= {"input": "one two three one two three", "max_output_tokens": 60}
    events = data_of(client.post(path, json=body))
    deltas = [e for e in events if str(e.get("type")).endswith(("delta", "text.delta"))]
    assert len(deltas) > 20
