"""Closes the paths of Ray's HTTP proxies, which ask for no key and tell of all routes."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class _Closed:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_rays = scope["type"] == "http" and scope["path"].startswith("/-/")
        answer = PlainTextResponse("not found", 404) if is_rays else self._app
        await answer(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Called by a proxy, by the name in ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``."""
    return [Middleware(_Closed)]
