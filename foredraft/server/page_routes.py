"""The page at `/`: its files, and the endpoints that it calls.

Everything it shows runs on the served model (`page_runs`). A Content-Security-Policy keeps scripts
and data of other sites out.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import anyio
from fastapi import APIRouter, FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from foredraft.llm import LLM
from foredraft.server.answers import stream_of
from foredraft.server.context import ServerContext
from foredraft.server.errors import ApiError, too_many
from foredraft.server.page_runs import Lanes, RunBody, run_lanes
from foredraft.server.wire import JsonResponse, data_event
from foredraft.system.machine import cpu_name
from foredraft.version import __version__

PAGE = Path(__file__).parent / "page"
MAX_RUNS = 4
"""Runs of the page at once."""
MAX_FORWARD_TOKENS = 80
"""Of a forward that the page times: sixteen requests with four guesses each."""

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


class ForwardBody(BaseModel):
    """The number of tokens of the forward to time."""

    model_config = ConfigDict(extra="forbid")
    num_tokens: Annotated[int, Field(ge=1, le=MAX_FORWARD_TOKENS)]


class _Page:
    """The page's state: its lanes, once there is a model, and how many runs are under way."""

    def __init__(self, context: ServerContext, llm: Callable[[], LLM]) -> None:
        self._context, self._llm = context, llm
        self._under_way: Counter[str] = Counter()
        self.turn = asyncio.Lock()  # each forward takes a turn of the engine
        self._lanes: Lanes | None = None

    @property
    def lanes(self) -> Lanes:
        _ = self._context.engine  # raises while the server drains
        self._lanes = self._lanes or Lanes(self._llm())
        return self._lanes

    async def stream(self, body: RunBody, key_id: str | None) -> AsyncGenerator[bytes, None]:
        """A run as server-sent events, for the holder of this key.

        The first event is empty and comes as soon as the run is accepted. The run ends within a
        step when the reader leaves.

        Raises:
            ApiError: 429: too many runs are under way; 408, 503: it was ended.
            ConfigError, PromptError: it cannot be run.
        """
        page_runs = self._context.metrics.page_runs
        with self.one_of_few("runs"), page_runs.track_inprogress():
            tenant = self._context.tenant(key_id, None)
            errors = list[ApiError]()  # of a drain or a timeout, which end the run

            async def end(error: ApiError) -> None:
                errors.append(error)

            began = time.perf_counter()
            async with self._context.under_way(end, end, lambda: began):
                steps = await run_in_threadpool(lambda: run_lanes(self.lanes, body, tenant))
                try:
                    yield b""
                    while (step := await run_in_threadpool(next, steps, None)) is not None:
                        if errors:
                            raise errors[0]
                        yield data_event(step)
                finally:
                    with anyio.CancelScope(shield=True):
                        await run_in_threadpool(steps.close)  # type: ignore[attr-defined]

    @contextmanager
    def one_of_few(self, kind: str) -> Iterator[None]:
        """Counts what is under way of a kind, and refuses more than `MAX_RUNS`."""
        if self._under_way[kind] >= MAX_RUNS:
            said = f"{MAX_RUNS} {kind} of the page are under way: try again in a moment"
            raise too_many(said, f"too_many_{kind}", seconds=2)
        self._under_way[kind] += 1
        try:
            yield
        finally:
            self._under_way[kind] -= 1


def is_page_file(path: str) -> bool:
    """Whether a path is that of the page itself: its files hold no data and need no key."""
    return path == "/" or path.startswith("/page/files/")


def include_page(app: FastAPI, context: ServerContext, llm: Callable[[], LLM]) -> None:
    """Serve the page at `/`, and its endpoints under `/page/`.

    Args:
        llm: returns the served model once it is loaded; the page inspects it.
    """
    page = _Page(context, llm)
    # In memory, so that no path from a request is ever opened.
    files = {
        path.relative_to(PAGE).as_posix(): (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(PAGE.rglob("*"))
        if path.suffix in _TYPES
    }
    router = APIRouter(include_in_schema=False)

    @router.get("/page/files/{name:path}")
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "the page has no such file")
        content, kind = files[name]
        return Response(content, media_type=kind, headers=_HEADERS)

    @router.get("/")
    async def index() -> Response:
        return await file("index.html")

    @router.get("/page/info")
    async def info() -> Response:
        figures = await run_in_threadpool(lambda: page.lanes.info())
        proof = llm().engine.proof
        proven = proof and {
            "every": proof.every,
            "steps": proof.num_steps,
            "differences": proof.num_differences,
        }
        about = {"version": __version__, "cpu": cpu_name(), "proof": proven}
        return JsonResponse(figures | about)

    @router.post("/page/run")
    async def run(body: RunBody, request: Request) -> Response:
        events = page.stream(body, request.state.key_id)

        def error_event(error: ApiError) -> bytes:
            return data_event({"type": "error", "message": error.message})

        return await stream_of(context, events, error_event)

    @router.post("/page/forward")
    async def forward(body: ForwardBody) -> Response:
        with page.one_of_few("forwards"):
            async with page.turn:
                ms = await run_in_threadpool(lambda: page.lanes.forward_ms(body.num_tokens))
        return JsonResponse({"num_tokens": body.num_tokens, "ms": round(ms, 3)})

    app.include_router(router)
