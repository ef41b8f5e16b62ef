"""The page at `/`: its files, and the endpoints that it calls.

Everything it shows is run here, on the served model, by engines of its own (`page_runs`). Files are
served as they are written, under a policy that lets nothing in from elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol

import anyio
from fastapi import APIRouter, FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.errors import ConfigError, ForedraftError, PromptError
from foredraft.llm import LLM
from foredraft.server.page_runs import MAX_DRAFT_TOKENS, Lanes, RunBody, run_lanes
from foredraft.server.wire import JsonResponse, data_event, event_stream
from foredraft.system.machine import cpu_name
from foredraft.version import __version__

PAGE = Path(__file__).parent / "page"
OPEN_PATHS = ("/", "/page/files/")
"""What needs no key: the page's own files, which hold no data."""
MAX_RUNS = 4
"""Runs of the page at once."""

_PING_SECONDS = 15.0
_log = logging.getLogger("foredraft.server")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PageContext(Protocol):
    """What the page needs of the server."""

    @property
    def llm(self) -> LLM:
        """The served model; raises what answers the request where it is not there yet."""
        ...

    def tenant(self, key_id: str | None, salt: object) -> str | None:
        """Whose drafting state a request with this API key shares."""
        ...


class ForwardBody(BaseModel):
    """How many tokens to time a forward of."""

    model_config = ConfigDict(extra="forbid")
    num_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS + 1)]


class _Page:
    """The page's state: its lanes, once there is a model, and how many runs are under way."""

    def __init__(self, context: PageContext) -> None:
        self._context = context
        self._num_runs = 0

    @cached_property
    def _lanes(self) -> Lanes:
        return Lanes(self._context.llm)

    @property
    def lanes(self) -> Lanes:
        _ = self._context.llm  # while the server drains, this says so
        return self._lanes

    def open(self, body: RunBody, key_id: str | None) -> Iterator[dict[str, Any]]:
        """Begin a run for whoever holds this key.

        Raises:
            HTTPException: 429: too many are under way; 400: it cannot be run.
        """
        if self._num_runs >= MAX_RUNS:
            raise HTTPException(
                429,
                f"{MAX_RUNS} runs of the page are under way: try again in a moment",
                {"Retry-After": "2"},
            )
        try:
            return run_lanes(self.lanes, body, self._context.tenant(key_id, None))
        except (ConfigError, PromptError) as error:
            raise HTTPException(400, str(error)) from error

    async def stream(self, events: Iterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """A run as server-sent events; a reader who leaves ends it within a step."""
        self._num_runs += 1  # here and not in `open`: what is never read is never counted
        try:
            while (event := await run_in_threadpool(next, events, None)) is not None:
                yield data_event(event)
        except ForedraftError as error:
            yield data_event({"type": "error", "message": str(error)})
        except Exception as error:
            _log.error("a run of the page failed", exc_info=error)
            yield data_event({"type": "error", "message": "it failed; the server's log says why"})
        finally:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(events.close)  # type: ignore[attr-defined]
            self._num_runs -= 1


def include_page(app: FastAPI, context: PageContext) -> None:
    """Serve the page at `/`, and what it calls under `/page/`.

    Paths in `OPEN_PATHS` (the second with all below it) need no key; the others are like any
    endpoint of the API.
    """
    page, files = _Page(context), _read_files()
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return _file(files, "index.html")

    @router.get("/page/files/{name:path}")
    async def file(name: str) -> Response:
        return _file(files, name)

    @router.get("/page/info")
    async def info() -> Response:
        told = await run_in_threadpool(lambda: page.lanes.info())
        return JsonResponse(told | {"version": __version__, "cpu": cpu_name()})

    @router.post("/page/run")
    async def run(body: RunBody, request: Request) -> Response:
        key_id = getattr(request.state, "key_id", None)
        events = await run_in_threadpool(page.open, body, key_id)
        return event_stream(page.stream(events), _PING_SECONDS)

    @router.post("/page/forward")
    async def forward(body: ForwardBody) -> Response:
        ms = await run_in_threadpool(lambda: page.lanes.forward_ms(body.num_tokens))
        return JsonResponse({"num_tokens": body.num_tokens, "ms": round(ms, 3)})

    app.include_router(router)


def _read_files() -> Mapping[str, tuple[bytes, str]]:
    """All files of the page, so that no path that somebody sends is ever opened."""
    return {
        path.relative_to(PAGE).as_posix(): (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(PAGE.rglob("*"))
        if path.suffix in _TYPES
    }


def _file(files: Mapping[str, tuple[bytes, str]], name: str) -> Response:
    if name not in files:
        raise HTTPException(404, "the page has no such file")
    content, kind = files[name]
    return Response(content, media_type=kind, headers=_HEADERS)
