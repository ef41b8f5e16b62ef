"""`GET /metrics`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from foredraft.server.routes.common import Context

router = APIRouter()


@router.get("/metrics")
async def metrics(context: Context) -> Response:
    """Counters in Prometheus' text format."""
    text = await asyncio.to_thread(context.metrics.render)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
