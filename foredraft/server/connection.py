"""Connections that cost little: time limits on headers and on unread data, and so many at most."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from foredraft.server.errors import unavailable
from foredraft.server.routes.health import OPEN_PATHS

_SEND_BUFFER = 256 << 10
"""Bytes that the system keeps for a client that does not read; by default it may be megabytes."""


def bounded_protocol(
    header_timeout: float, send_timeout: float, max_connections: int
) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1, which drops a client that sends no headers, or reads nothing, in time.

    Args:
        header_timeout: seconds from connecting to the end of the first request's headers, and from
            the beginning of each further request to the end of its own.
        send_timeout: seconds that data may wait for a client to read.
        max_connections: requests on further ones get 503, but for probes.
    """

    class BoundedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self._headers = _Deadline(header_timeout, self.loop, transport)
            self._unread = _Deadline(send_timeout, self.loop, transport)
            self._headers.begin()
            if len(self.connections) > max_connections:
                self.app = _Crowded(self.app, max_connections)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:  # what has come so far is no whole head
                self._headers.begin()
            else:
                self._headers.lift()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread.begin()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unread.lift()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers.lift()
            self._unread.lift()
            super().connection_lost(exc)

    return BoundedProtocol


class _Crowded:
    """The application where there are too many connections: it is well, and answers probes."""

    def __init__(self, app: Any, max_connections: int) -> None:
        self._app: ASGIApp = app
        self._error = unavailable(
            f"there are more than {max_connections} connections", "too_many_connections"
        )
        self._error.headers["Connection"] = "close"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_probe = scope["path"] in OPEN_PATHS
        answer = self._app if is_probe else self._error.response(scope["path"])
        await answer(scope, receive, send)


class _Deadline:
    """Drops a connection, unless it is lifted in time."""

    def __init__(
        self, seconds: float, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport
    ) -> None:
        self._seconds, self._loop, self._transport = seconds, loop, transport
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """From now on, unless it has begun already."""
        if self._timer is None:
            # Not `close`, which would wait until the client has read what is there.
            self._timer = self._loop.call_later(self._seconds, self._transport.abort)

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
