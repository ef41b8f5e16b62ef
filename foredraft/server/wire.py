"""JSON and server-sent events, as bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def as_json(value: Any) -> bytes:
    """Compact; half surrogate pairs, which clients may send, become question marks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class JsonResponse(Response):
    """A response of plain data."""

    media_type = "application/json"

    def __init__(
        self, value: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(as_json(value), status_code, dict(headers or {}))


def data_event(value: Any) -> bytes:
    """An event of OpenAI's chat and completions."""
    return b"data: " + as_json(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """An event with its type's name, as OpenAI's responses and Anthropic have it."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data_event(value)


class _Events(EventSourceResponse):
    """A client that does not read is cut off by its connection; that is no fault to be logged."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.send_timeout):
                    while (await receive())["type"] != "http.disconnect":
                        pass


def event_stream(
    events: AsyncIterator[bytes],
    ping_interval: float,
    send_timeout: float,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Events as they come, with comments between them when there is silence."""
    return _Events(
        events,
        ping=ping_interval,
        ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
        send_timeout=send_timeout,
        headers=dict(headers or {}),
    )
