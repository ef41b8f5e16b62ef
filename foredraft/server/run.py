"""Runs the application with uvicorn: bounded connections, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from foredraft.core.errors import ConfigError
from foredraft.server.context import ServerContext
from foredraft.server.errors import unavailable
from foredraft.server.info import OPEN_PATHS
from foredraft.server.settings import ServerSettings

_log = logging.getLogger("foredraft.server")
_EXIT_SECONDS = 5
_SEND_BUFFER = 256 << 10
"""Send buffer in bytes for a client that does not read; the system's default may be megabytes."""


class GracefulServer(uvicorn.Server):
    """uvicorn that drains on SIGTERM or Ctrl-C: replies under way may finish first.

    Meanwhile probes are answered and new requests get 503. Replies still running after
    ``drain_timeout`` are aborted with an error event. A second signal aborts them immediately.
    """

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _serve(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        await super()._serve(sockets)  # type: ignore[arg-type]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit or self._loop is None:
            super().handle_exit(signal.SIGINT, frame)  # nothing is left that could be ended well
            return
        self._captured_signals.append(sig)
        self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Drain and stop; a second call does not wait. To be called on the server's loop."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._context.hurry()

    async def _drain(self) -> None:
        if self._context.num_live:
            _log.warning("waiting for %d requests to end", self._context.num_live)
        await self._context.drain()
        self.should_exit = True


def bind(settings: ServerSettings) -> socket.socket:
    """A socket that listens at the server's address. To be bound before a model is loaded.

    Raises:
        ConfigError: the address cannot be bound.
    """
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken, perhaps by another server: give another --port, "
                "or 0 for any free one"
            ) from None
        raise ConfigError(
            f"{host} port {port} cannot be bound: {error.strerror or error}"
        ) from None
    return sock


def new_server(app: FastAPI) -> GracefulServer:
    """A server for an application of `create_app`."""
    context: ServerContext = app.state.context
    settings = context.settings
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_protocol(settings),
        ws="none",
        timeout_keep_alive=settings.keep_alive_timeout,
        timeout_graceful_shutdown=_EXIT_SECONDS,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
    )
    return GracefulServer(config, context)


def bounded_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1, which drops a client that sends no headers, or reads nothing, in time.

    The time for headers counts from connecting, then from the beginning of each further request.
    """

    class BoundedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self._headers = _Deadline(settings.header_timeout, self.loop, transport)
            self._unread = _Deadline(settings.send_timeout, self.loop, transport)
            self._headers.begin()
            if len(self.connections) > settings.max_connections:
                self.app = _Crowded(self.app, settings.max_connections)

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
    """The application for connections over the limit: probes are answered, all else gets 503."""

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
    """Drops a connection after a time, unless it is lifted before."""

    def __init__(
        self, seconds: float, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport
    ) -> None:
        self._seconds, self._loop, self._transport = seconds, loop, transport
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start the clock, unless it runs already."""
        if self._timer is None:
            # Not `close`, which would wait until the client has read the buffered data.
            self._timer = self._loop.call_later(self._seconds, self._transport.abort)

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
