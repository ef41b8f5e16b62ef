"""Routes that read large bodies on a thread, so that streams go on meanwhile."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.errors import PromptError
from foredraft.server.context import LARGE, ServerContext
from foredraft.server.errors import TOO_MANY_DIGITS, ApiError
from foredraft.system.priority import Rests

_MOST_FIELDS = 1000
_LISTS = re.compile(rb"\[\s*+\d[\d\s,]{4096,}+\]")
"""Long lists of whole numbers."""
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
                request._json = await context.on_thread(size, _checked, context, model, body)
            return await answer(request)

        return parsed


def _parsed(body: bytes) -> Any:
    """JSON, with long lists of numbers in pieces: one call holds the lock all along."""
    plain = body.replace(rb"\\", b"__").replace(rb"\"", b"__")
    mark = f"0e{secrets.randbits(64)}"  # stands for a list meanwhile
    pieces, lists, looked_at, copied, num_quotes = list[bytes](), list[list[int]](), 0, 0, 0
    for found in _LISTS.finditer(plain):
        start, end = found.span()
        num_quotes += plain.count(b'"', looked_at, start)
        looked_at = end
        if num_quotes % 2 == 0:  # it stands in no text
            pieces += body[copied:start], f" {mark} ".encode()
            lists.append(_numbers(found[0]))
            copied = end
    left, rest = iter(lists), Rests()

    def noted(each: dict[str, Any]) -> dict[str, Any]:
        rest()
        return each

    return json.loads(
        b"".join([*pieces, body[copied:]]),
        parse_float=lambda text: next(left) if text == mark else float(text),
        object_hook=noted,
    )


def _numbers(text: bytes) -> list[int]:
    """A list of whole numbers; raises as `_parsed`."""
    numbers, start, last, rest = list[int](), 1, len(text) - 1, Rests()
    while start <= last:
        rest()
        end = text.find(b",", min(start + _AT_ONCE, last))
        end = last if end < 0 else end
        numbers += json.loads(b"[0,%b]" % text[start:end])[1:]  # nothing at its end is an error
        start = end + 1
    return numbers


def _checked(context: ServerContext, model: type[BaseModel], body: bytes) -> BaseModel:
    """A body as FastAPI would read it; raises as it would, and as `_check_prompt`."""
    try:
        value = _parsed(body)
    except json.JSONDecodeError as error:
        where = {"loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([{"type": "json_invalid", **where}]) from error
    except ValueError as error:
        raise ApiError(400, TOO_MANY_DIGITS) from error
    if isinstance(value, dict):
        if len(value) > _MOST_FIELDS:
            raise ApiError(400, f"the body has {len(value)} fields; it may have {_MOST_FIELDS}")
        _check_prompt(context, value.get("prompt"))
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(problems) from error


def _check_prompt(context: ServerContext, prompt: Any) -> None:
    """Raises a `PromptError` for more token ids than the model reads: to check all takes long."""
    if isinstance(prompt, list):
        most = max(context.llm.max_prompt, context.llm.max_context)
        if len(prompt) > most and isinstance(prompt[0], int):
            raise PromptError.too_long(len(prompt), most, "this model reads no more")
