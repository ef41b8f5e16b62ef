"""The server's application called from within its process, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Message

from foredraft.llm import LLM
from foredraft.server.app import create_app
from foredraft.server.settings import ServerSettings

_NEVER = 1e9
"""Seconds."""
_ANY = 1 << 30


def local_settings(**more: Any) -> ServerSettings:
    """Settings without keys, limits of time, and most limits of size: whoever asks waits here.

    Args:
        **more: fields of `ServerSettings`.
    """
    without_limit = dict.fromkeys(
        ("max_waiting", "max_body_bytes", "max_n", "max_replies", "max_messages", "max_tools"), _ANY
    )
    return ServerSettings(
        **{
            "api_key": None,
            "api_key_file": None,
            "request_timeout": _NEVER,
            "body_timeout": _NEVER,
            **without_limit,
            **more,
        }
    )


@asynccontextmanager
async def in_process(llm: LLM, settings: ServerSettings) -> AsyncIterator[InProcess]:
    """The server for a model that is loaded already."""
    loaded = asyncio.Event()
    app = create_app(lambda feed: llm, settings, lambda context: loaded.set())
    async with app.router.lifespan_context(app):
        await loaded.wait()
        if app.state.context.failure is not None:
            raise app.state.context.failure
        yield InProcess(app)


class InProcess:
    """Posts to an ASGI application. A call that is cancelled ends like a connection that closes.

    Args:
        app: which application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Status and body of the answer to a request with a body of plain data."""
        content = json.dumps(body).encode()
        waiting = [{"type": "http.request", "body": content, "more_body": False}]
        status, parts = 0, list[bytes]()

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"127.0.0.1"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
            ],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        await self._app(scope, receive, send)
        return status, json.loads(b"".join(parts))
