"""The application: routes and middleware."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from foredraft.async_llm import AsyncLLM
from foredraft.core.errors import ForedraftError
from foredraft.engine.policy import Trace
from foredraft.llm import LLM
from foredraft.server import info
from foredraft.server.answers import DEFAULTS_HEADER, IGNORED_HEADER
from foredraft.server.context import ServerContext
from foredraft.server.dialects import chat, completions, infill, messages, responses, tokenize
from foredraft.server.engine import LoadEngine
from foredraft.server.errors import ApiError, answer
from foredraft.server.gate import REQUEST_IDS, AccessLog, BodyLimits, Gate
from foredraft.server.page_routes import include_page, is_page_file
from foredraft.server.settings import ServerSettings
from foredraft.version import __version__

LoadModel = Callable[[Trace], LLM]
"""Loads the model; its engine calls the trace after each step."""

_TITLE = "foredraft"
_ROUTES = (chat, completions, infill, responses, messages, tokenize, info)


def create_app(
    load: LoadModel,
    settings: ServerSettings | None = None,
    when_loaded: Callable[[ServerContext], None] | None = None,
) -> FastAPI:
    """The server of a model in this process, with its page, as an ASGI application.

    While the model is loaded it answers with 503.

    Args:
        load: loads the model, on a thread of its own. It gets the trace that its engine must call
            after each step.
        settings: None takes those of the environment.
        when_loaded: called when the model is loaded, or could not be (`ServerContext.failure`).

    Raises:
        ConfigError: keys that cannot be used.
    """
    loaded: list[LLM] = []

    def load_here(context: ServerContext) -> AsyncLLM:
        llm = load(context.metrics.add_step)
        loaded.append(llm)
        context.metrics.watch_speculation(llm)
        if llm.grammars is not None:
            llm.grammars.prepare()
        return AsyncLLM(
            llm,
            max_waiting=context.settings.max_waiting,
            prove_every=context.settings.prove_every,
            on_proof=context.metrics.add_proof,
            give_back_after=context.settings.give_back_after,
        )

    app = api_app(load_here, settings, when_loaded)
    if app.state.context.settings.has_page:
        include_page(app, app.state.context, lambda: loaded[0])
    return app


def api_app(
    load: LoadEngine,
    settings: ServerSettings | None = None,
    when_loaded: Callable[[ServerContext], None] | None = None,
    salt: bytes | None = None,
) -> FastAPI:
    """The HTTP APIs over an engine in any process; see `create_app` and `ServerContext`."""
    context = ServerContext(settings or ServerSettings(), load, salt)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async def start() -> None:
            await context.start()
            if when_loaded is not None:
                when_loaded(context)

        starting = asyncio.create_task(start())
        try:
            yield
        finally:
            starting.cancel()  # the thread that loads is left behind: nothing can stop it
            await asyncio.wait((starting,))
            await context.stop()

    # Its own pages for documentation would load scripts from elsewhere.
    app = FastAPI(
        title=_TITLE,
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    app.include_router(info.probes)
    # In the OpenAPI document routes need a key, which the `Gate` checks.
    named_keys = [Security(HTTPBearer(auto_error=False))] if context.keys else []
    for routes in _ROUTES:
        app.include_router(routes.router, dependencies=named_keys)
    # Starlette raises exceptions that only the handler of Exception takes again, and logs them as
    # faults of the server.
    known = (ApiError, ForedraftError, RequestValidationError, HTTPException, ClientDisconnect)
    for kind in (*known, Exception):
        app.add_exception_handler(kind, answer)
    _add_middleware(app, context)
    return app


def _add_middleware(app: FastAPI, context: ServerContext) -> None:
    """Starlette calls the middleware that was added last first."""
    settings = context.settings

    def is_open(path: str) -> bool:
        return path in info.OPEN_PATHS or is_page_file(path)

    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(Gate, keys=context.keys, settings=settings, is_open=is_open)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # the official SDKs send a dozen of their own (x-stainless-…)
            expose_headers=[
                *(IGNORED_HEADER, DEFAULTS_HEADER, "retry-after", "x-should-retry"),
                *REQUEST_IDS,
            ],
        )
    app.add_middleware(AccessLog, metrics=context.metrics)
