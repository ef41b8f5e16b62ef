"""A line of JSON for each request, without anything of what was said in it."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.metrics import Metrics

_log = logging.getLogger("foredraft.server.access")
_UNKNOWN = "unknown"


class AccessLog:
    """Middleware that logs and counts answers, by route and never by what a client wrote.

    A path that is no route is not logged: a client may write into it whatever it likes.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", _UNKNOWN)
            self._metrics.add_response(route, status)
            if _log.isEnabledFor(logging.INFO):
                _log.info(json.dumps(_line(scope, route, status, time.perf_counter() - began)))


def _line(scope: Scope, route: str, status: int, seconds: float) -> dict[str, Any]:
    return {
        "method": scope["method"] if scope["method"].isalpha() else _UNKNOWN,
        "route": route,
        "status": status,
        "ms": round(seconds * 1000, 1),
        "client": (scope.get("client") or (None,))[0],
        "key": scope.get("state", {}).get("key_id"),
    }
