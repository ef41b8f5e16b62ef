"""Routes about the server itself: health, version, metrics and models."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from foredraft.server.answers import ContextDep, error_responses
from foredraft.server.context import ServerContext
from foredraft.server.errors import unavailable
from foredraft.server.wire import JsonResponse
from foredraft.version import __version__

OPEN_PATHS = frozenset({"/health", "/ready", "/live"})
"""For probes, which carry no key."""

probes = APIRouter()
router = APIRouter()


@probes.head("/live", include_in_schema=False)
@probes.get("/live")
async def live(context: ContextDep) -> Response:
    """Whether the process is well: while it is not, only a restart helps."""
    if not context.is_live:
        raise unavailable("the engine has stopped; see the server's log", "not_live")
    return JsonResponse({"status": "ok"})


@probes.head("/health", include_in_schema=False)
@probes.get("/health")
async def health(context: ContextDep, ready: str = "0") -> Response:
    """Whether the process is well and the model loaded. With ``?ready``, as `/ready`."""
    if ready.lower() not in ("0", "false"):
        return await is_ready(context)
    if context.is_live and not context.has_engine:
        what = "the model is still being loaded" if context.is_loading else "no engine is there"
        raise unavailable(what, "loading" if context.is_loading else "no_engine")
    return await live(context)


@probes.head("/ready", include_in_schema=False)
@probes.get("/ready")
async def is_ready(context: ContextDep) -> Response:
    """Whether it takes requests: not while the model is loaded, nor while it shuts down."""
    if not context.is_ready:
        raise unavailable("the server is loading or shutting down", "not_ready")
    return JsonResponse({"status": "ready"})


@router.get("/version")
async def version() -> Response:
    """The version of foredraft."""
    return JsonResponse({"version": __version__})


@router.get("/metrics")
async def metrics(context: ContextDep) -> Response:
    """Counters in Prometheus' text format."""
    text = await asyncio.to_thread(context.metrics.render)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", responses=error_responses())
async def list_models(context: ContextDep) -> Response:
    """The model that is served, under each of its names."""
    names = context.model_names
    models = [_described(context, name) for name in names]
    answer: dict[str, Any] = {"object": "list", "data": models}
    answer |= {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
    return JsonResponse(answer | {"models": models})  # some agents look there


@router.get("/v1/models/{model:path}", responses=error_responses())
async def retrieve_model(model: str, context: ContextDep) -> Response:
    """One of its names."""
    return JsonResponse(_described(context, context.check_model(model)))


def _described(context: ServerContext, name: str) -> dict[str, Any]:
    max_context = context.llm.max_context
    created = datetime.fromtimestamp(context.created, UTC)
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "foredraft",
        "root": context.model_names[0],
        "max_model_len": max_context,
        # aliases for clients of other APIs
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "slug": name,
        "context_window": max_context,
    }
