"""`GET /health`, `/ready` and `/version`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from foredraft.server.errors import unavailable
from foredraft.server.routes.common import Context
from foredraft.server.wire import JsonResponse
from foredraft.version import __version__

OPEN_PATHS = frozenset({"/health", "/ready"})
"""For probes, which carry no key."""

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(context: Context, ready: str = "0") -> Response:
    """Whether the process is well. With ``?ready``, as `/ready`."""
    if ready.lower() not in ("0", "false"):
        return await is_ready(context)
    if not context.is_live:
        raise unavailable("the engine has stopped; see the server's log", "not_live")
    return JsonResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def is_ready(context: Context) -> Response:
    """Whether it takes requests: not while the model is loaded, nor while it shuts down."""
    if not context.is_ready:
        raise unavailable("the server is loading or shutting down", "not_ready")
    return JsonResponse({"status": "ready"})


@router.get("/version")
async def version() -> Response:
    """Of foredraft."""
    return JsonResponse({"version": __version__})
