"""Routes that read large bodies on a thread, so that streams go on meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.context import LARGE, ServerContext
from foredraft.server.errors import ApiError

_MOST_FIELDS = 1000


class ParsedRoute(APIRoute):
    """A route with a body of JSON, which a thread parses and checks where it is large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer, field = super().get_route_handler(), self.body_field
        if field is None:
            return answer
        model = field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)

        async def parsed(request: Request) -> Response:
            if (size := len(body := await request.body())) > LARGE:
                context: ServerContext = request.app.state.context
                # FastAPI takes an instance of the model as it is.
                request._json = await context.on_thread(size, _checked, model, body)
            return await answer(request)

        return parsed


def _checked(model: type[BaseModel], body: bytes) -> BaseModel:
    """A body as FastAPI would read it; raises as it would."""
    try:
        value = json.loads(body)
        if isinstance(value, dict) and len(value) > _MOST_FIELDS:
            raise ApiError(400, f"the body has {len(value)} fields; it may have {_MOST_FIELDS}")
        return model.model_validate(value)
    except json.JSONDecodeError as error:
        where = {"loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([{"type": "json_invalid", **where}]) from error
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(problems) from error
    except ValueError as error:  # no UTF-8, or a number of thousands of digits
        raise ApiError(400, "There was an error parsing the body") from error
