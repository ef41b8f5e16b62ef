"""Routes that read large bodies on a thread, so that streams go on meanwhile."""

from __future__ import annotations

import json
import math
import re
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
_LISTS = re.compile(rb"-Infinity|\[\s*+\d[\d\s,]{4096,}+\]")
"""Long lists of whole numbers, and the word that stands for them meanwhile."""
_AT_ONCE = 64 << 10
"""Bytes of numbers that are parsed in one call: some 20,000 token ids, in a millisecond."""


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


def _parsed(body: bytes) -> Any:
    """JSON, with long lists of numbers in pieces: one call holds the interpreter's lock all along.

    Raises:
        ValueError: it is none.
    """
    plain = body.replace(rb"\\", b"__").replace(rb"\"", b"__")
    pieces, values, looked_at, copied, num_quotes = list[bytes](), list[Any](), 0, 0, 0
    for found in _LISTS.finditer(plain):
        start, end = found.span()
        num_quotes += plain.count(b'"', looked_at, start)
        looked_at = end
        if num_quotes % 2 == 0:  # it stands in no text
            pieces += body[copied:start], b"-Infinity"
            values.append(_numbers(found[0]) if found[0] != b"-Infinity" else -math.inf)
            copied = end
    left = iter(values)
    return json.loads(
        b"".join([*pieces, body[copied:]]),
        parse_constant=lambda name: next(left) if name == "-Infinity" else float(name),
    )


def _numbers(text: bytes) -> list[int]:
    """A list of whole numbers; raises as `_parsed`."""
    numbers, start, last = list[int](), 1, len(text) - 1
    while start <= last:
        end = text.find(b",", min(start + _AT_ONCE, last))
        end = last if end < 0 else end
        numbers += json.loads(b"[0,%b]" % text[start:end])[1:]  # nothing at its end is an error
        start = end + 1
    return numbers


def _checked(model: type[BaseModel], body: bytes) -> BaseModel:
    """A body as FastAPI would read it; raises as it would."""
    try:
        value = _parsed(body)
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
