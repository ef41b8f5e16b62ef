"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from foredraft.server.context import ServerContext
from foredraft.server.routes.common import Context
from foredraft.server.schemas.common import error_responses
from foredraft.server.wire import JsonResponse

router = APIRouter()


@router.get("/v1/models", responses=error_responses())
async def list_models(context: Context) -> Response:
    """The model that is served, under each of its names."""
    models = [_described(context, name) for name in context.model_names]
    # Some agents look for `models`.
    return JsonResponse({"object": "list", "data": models, "models": models})


@router.get("/v1/models/{model:path}", responses=error_responses())
async def retrieve_model(model: str, context: Context) -> Response:
    """One of them."""
    return JsonResponse(_described(context, context.check_model(model)))


def _described(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "foredraft",
        "root": context.model_names[0],
        "max_model_len": context.llm.target.max_context,
        # The same for clients of other dialects.
        "type": "model",
        "display_name": name,
        "slug": name,
        "context_window": context.llm.target.max_context,
    }
