"""Closes what Ray opens without a key: paths of its HTTP proxies, and ports of replicas."""

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


def close_port() -> None:
    """Called in a replica's process: Ray opens no port in it for calls by gRPC.

    It would take calls at all addresses, unpickle them, and ask for no token. Ours go another way,
    unless ``RAY_SERVE_USE_GRPC_BY_DEFAULT`` says so.
    """
    from ray.serve._private import constants, replica

    if not constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        if not hasattr(replica, "add_port_to_grpc_server"):
            raise RuntimeError(
                "this version of Ray opens its replicas' ports another way: use 2.60"
            )
        replica.add_port_to_grpc_server = lambda server, address: 0
