"""JSON and server-sent events, as bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.system.priority import Rests

FEW = 64
"""Entries of a list that are written at once."""
DONE = b"data: [DONE]\n\n"
_PING = b": ping\n"  # SDKs take an empty line behind an event with an id for one more event
_STREAM_HEADERS = {
    "cache-control": "no-store",
    "connection": "keep-alive",
    "x-accel-buffering": "no",  # nginx passes each event on at once
}


@dataclass(frozen=True)
class Made:
    """Entries of a long list, made as they are written: no collection of garbage sees them all.

    A thread must write them, for it rests in between.
    """

    make: Callable[[Any], Any]
    of: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        rest = Rests()
        for each in self.of:
            yield self.make(each)
            rest()


def as_json(value: Any) -> bytes:
    """Compact JSON. Half surrogate pairs become question marks, and NaN and infinity null."""
    try:
        return to_json(value, inf_nan_mode="null")  # a third of what `json` takes, at every event
    except PydanticSerializationError:  # half a pair, or `Made`
        if isinstance(value, dict | list | tuple | Made):
            return _in_pieces(value)
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _in_pieces(value: Any) -> bytes:
    """JSON of many calls: none of them holds the interpreter's lock for long."""
    if isinstance(value, dict):
        fields = (as_json(str(key)) + b":" + _in_pieces(each) for key, each in value.items())
        return b"{" + b",".join(fields) + b"}"
    if isinstance(value, list | tuple) and len(value) <= FEW:  # such as of choices
        return b"[" + b",".join(map(_in_pieces, value)) + b"]"
    if isinstance(value, list | tuple | Made):
        entries = iter(value)
        pieces = iter(lambda: [*islice(entries, FEW)], [])
        return b"[" + b",".join(as_json(piece)[1:-1] for piece in pieces) + b"]"
    return as_json(value)


class JsonResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def __init__(
        self, value: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(_in_pieces(value), status_code, dict(headers or {}))


def data_event(value: Any) -> bytes:
    """An event of OpenAI's chat and completions."""
    return b"data: " + as_json(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """An event with its type's name, as OpenAI's responses and Anthropic have it."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data_event(value)


async def until_gone(receive: Receive) -> None:
    """Wait for the client to leave; what it sends until then is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


class SseResponse(Response):
    """A stream of events, which ends when the client leaves; comments keep it open meanwhile.

    Connections have a time limit of their own (`bounded_protocol`).

    Args:
        ping_interval: seconds between two comments.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ping_interval: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events, self._ping_interval = events, ping_interval
        self.status_code, self.background = 200, None
        self.init_headers({**(headers or {}), **_STREAM_HEADERS})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})

        async def ping() -> None:
            while True:
                await asyncio.sleep(self._ping_interval)
                await send({"type": "http.response.body", "body": _PING, "more_body": True})

        tasks = list[asyncio.Future[None]]()
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            tasks += map(asyncio.ensure_future, (write(), until_gone(receive), ping()))
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()
        if not tasks[0].cancelled():
            tasks[0].result()  # raises what went wrong
            await send({"type": "http.response.body", "body": b"", "more_body": False})
