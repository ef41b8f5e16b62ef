"""Running the application, and ending it without cutting anybody off."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from foredraft.server.connection import bounded_protocol
from foredraft.server.context import ServerContext

_log = logging.getLogger("foredraft.server")
_EXIT_SECONDS = 5


class GracefulServer(uvicorn.Server):
    """uvicorn, which on SIGTERM or Ctrl-C lets replies under way come to their end.

    Until they have, probes are answered and new requests are refused with 503. What is not over
    after ``drain_timeout`` ends with an error event. A second signal does not wait.

    Attributes:
        address: where it is found; None before it listens.
    """

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._when_listening: list[Callable[[str], None]] = []
        self.address: str | None = None

    def when_listening(self, tell: Callable[[str], None]) -> None:
        """Tell the address, now or once there is one."""
        if self.address is None:
            self._when_listening.append(tell)
        else:
            tell(self.address)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        port = self.servers[0].sockets[0].getsockname()[1]
        self.address = self._context.settings.address(port)
        for tell in self._when_listening:
            tell(self.address)

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
        """Begin to end, and the second time do not wait; call it on the server's loop."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._context.hurry()

    async def _drain(self) -> None:
        if self._context.num_live:
            _log.warning("waiting for %d requests to end", self._context.num_live)
        await self._context.drain()
        self.should_exit = True


def new_server(app: FastAPI) -> GracefulServer:
    """A server for an application of `create_app`."""
    context: ServerContext = app.state.context
    settings = context.settings
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_protocol(
            settings.header_timeout, settings.send_timeout, settings.max_connections
        ),
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
