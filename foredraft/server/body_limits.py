"""Bodies within bounds, before anything is made of them."""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.errors import ApiError
from foredraft.server.settings import ServerSettings

_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class BodyLimits:
    """Middleware that reads a body whole: bounded in size, depth and time, and JSON by its type.

    A type of its own is asked for because a web page can send text to any server unasked, and JSON
    only where the server agrees.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except ApiError as error:
            error.headers["Connection"] = "close"  # the rest of the body is not read
            await error.response(scope["path"])(scope, receive, send)
            return
        if body is None:
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None when the client has gone."""
        limit = self._settings.max_body_bytes
        named = headers.get("content-length", "")
        if named.isdecimal() and int(named[:20]) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                body = await _collect(receive, limit)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", code="body_timeout") from None
        if not body:
            return body
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"content-type is {kind!r:.100}; it must be application/json")
        if _is_deeper(body, self._settings.max_depth):
            raise ApiError(
                400,
                f"the body nests lists and objects deeper than {self._settings.max_depth}",
                code="too_deep",
            )
        return body


async def _collect(receive: Receive, limit: int) -> bytes | None:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def _is_deeper(body: bytes, limit: int) -> bool:
    """Whether JSON nests deeper than ``limit``, found without parsing it."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    depth = 0
    for found in _STRUCTURE.finditer(body):
        first = body[found.start()]
        if first in b"[{":
            depth += 1
            if depth > limit:
                return True
        elif first in b"]}":
            depth -= 1
    return False
