"""A response of server-sent events: as they come, while somebody is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.server.disconnect import unless_gone

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Nobody on the way is to keep the events, or to collect them."""
_PING = b": ping\n\n"


class EventStream(Response):
    """Sends events, and comments in silence. They are closed at their end, or when the client goes.

    One that stays and does not read is cut off by its connection (`bounded_protocol`).

    Args:
        events: as bytes.
        ping_interval: seconds of silence before a comment, and at most as many again.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ping_interval: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events, self._ping_interval = events, ping_interval
        self._is_silent = True
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS | dict(headers or {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        with contextlib.suppress(ClientDisconnect):
            await unless_gone(Request(scope, receive), self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        pinging = asyncio.create_task(self._ping(send))
        try:
            async for event in self._events:
                self._is_silent = False
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            pinging.cancel()
            await self._events.aclose()

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._ping_interval)
            if self._is_silent:
                await send({"type": "http.response.body", "body": _PING, "more_body": True})
            self._is_silent = True
