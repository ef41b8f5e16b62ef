"""Connections that cost little when a client is slow: time limits on headers and on unread data."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_SEND_BUFFER = 256 << 10
"""Bytes that the system keeps for a client that does not read; by default it may be megabytes."""


def bounded_protocol(header_timeout: float, send_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1, which drops a client that sends no headers, or reads nothing, in time.

    Args:
        header_timeout: seconds from connecting to the end of the first request's headers.
        send_timeout: seconds that data may wait for a client to read.
    """

    class BoundedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self._start(header_timeout)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None:  # a request's headers are complete
                self._stop()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start(send_timeout)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _start(self, seconds: float) -> None:
            self._stop()
            # Not `close`, which would wait until the client has read what is there.
            self._timer = self.loop.call_later(seconds, self.transport.abort)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return BoundedProtocol
