"""Errors as clients see them: OpenAI's shape, and Anthropic's on its routes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from foredraft.core.checks import shown
from foredraft.core.errors import (
    CapabilityError,
    ConfigError,
    EngineStoppedError,
    ForedraftError,
    PromptError,
    QueueFullError,
)
from foredraft.server.wire import JsonResponse

_log = logging.getLogger("foredraft.server")

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_KINDS = _KINDS | {
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
_RETRY_SECONDS = 1
_CLOSED_BY_CLIENT = 499
_MAX_MESSAGE = 2000
TOO_MANY_DIGITS = "the body holds a whole number of thousands of digits: write a shorter one"


class ApiError(Exception):
    """An error as the client sees it.

    Attributes:
        status: HTTP status.
        message: the problem, the value, and the remedy.
        param: the field it is about.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message[:_MAX_MESSAGE]
        self.param, self.code, self.headers = param, code, dict(headers or {})

    @property
    def for_openai(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error")
        inner = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": inner}

    @property
    def for_anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> Response:
        """The answer on this path, in the form of its API."""
        is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
        body = self.for_anthropic if is_anthropic else self.for_openai
        return JsonResponse(body, self.status, self.headers)


def unavailable(message: str, code: str) -> ApiError:
    """The error of a server that cannot answer now: 503. The client may retry soon."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(_RETRY_SECONDS)})


def too_many(message: str, code: str, seconds: int = _RETRY_SECONDS) -> ApiError:
    """The error of a client, or a server, with too much under way: 429.

    Args:
        seconds: after which the client may retry.
    """
    return ApiError(429, message, code=code, headers={"Retry-After": str(seconds)})


def as_api_error(error: BaseException) -> ApiError:
    """An exception as the client may see it. Unexpected ones are logged, and not described."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return too_many(str(error), "queue_full")
    if isinstance(error, EngineStoppedError):
        return unavailable("the engine is not running; see the server's log", "engine_stopped")
    is_clients = not isinstance(error, CapabilityError)  # else the server's operator made it
    if isinstance(error, (PromptError, ConfigError)) and is_clients:
        return ApiError(400, str(error), param=error.field, code=error.code)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):  # FastAPI's own does not say that it is Python's limit
        said = TOO_MANY_DIGITS if isinstance(error.__cause__, ValueError) else str(error.detail)
        return ApiError(error.status_code, said, headers=error.headers)
    if isinstance(error, ClientDisconnect):
        return ApiError(_CLOSED_BY_CLIENT, "the client has gone")
    known = isinstance(error, ForedraftError)
    _log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return ApiError(500, str(error) if known else f"internal error ({type(error).__name__})")


@contextmanager
def naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the request's field, not the sampling parameter that was made of it.

    Args:
        names: the field of each parameter.
    """
    try:
        yield
    except (ConfigError, ApiError) as error:
        known = as_api_error(error)
        name = names.get(known.param or "")
        if name is None or name == known.param:
            raise
        message = f"{name}: {known.message}"
        raise ApiError(known.status, message, param=name, code=known.code) from error


def _invalid(error: RequestValidationError) -> ApiError:
    """The first error of the schema check, with field and value."""
    problems = error.errors()
    first = problems[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', '')}")
    if not path:
        return ApiError(400, f"the body must be a JSON object: {first['msg']}")
    where = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path).lstrip(".")
    if first["type"] == "missing":
        return ApiError(400, f"{where} is missing", param=path[0], code="missing")
    if first["type"] == "not_supported":
        text = f"{where} is not supported: {first['msg']}"
        return ApiError(400, text, param=path[0], code="not_supported")
    if first["type"] == "value_error":  # of a check of our own
        return ApiError(400, f"{path[0]}: {first['ctx']['error']}", param=path[0])
    value, wrong = shown(first.get("input")), first["msg"].lower()
    of_field = (each["loc"] for each in problems if each["loc"][1:2] == first["loc"][1:2])
    inner = dict.fromkeys(str(place[2]) for place in of_field if len(place) > 2)
    forms = [each for each in inner if each == "str" or "[" in each]  # others are its own fields
    if len(forms) > 1:  # pydantic has an error for each
        where, wrong = path[0], f"it must be {' or '.join(forms)}"
    return ApiError(400, f"{where} is {value}: {wrong}", param=path[0])


async def answer(request: Request, error: Exception) -> Response:
    """Answers a request that raised an exception."""
    known = as_api_error(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        what = f"{request.method} {request.url.path}"
        known.message = f"there is no {what:.200}; /openapi.json lists the routes"
    return known.response(request.url.path)
