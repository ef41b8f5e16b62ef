"""`foredraft serve`: the model behind OpenAI's and Anthropic's interfaces, and a page."""

from __future__ import annotations

import logging
import re
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.options import LoadOptions
    from foredraft.server.context import LoadModel, ServerContext, StepFeed
    from foredraft.server.settings import ServerSettings

_SERVER, _ACCESS, _LIMITS = "Server", "Access", "Limits"


def _option(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


@dataclass(frozen=True)
class ServerOptions:
    """Where it listens, and what it says. Fields of `ServerSettings`, as in the other two."""

    host: Annotated[
        str | None, _option(_SERVER, "--host", "Address to bind to; this machine only by default.")
    ] = None
    port: Annotated[
        int | None, _option(_SERVER, "--port", "Port; 8000 by default, 0 takes a free one.")
    ] = None
    served_model_names: Annotated[
        list[str] | None,
        _option(_SERVER, "--served-model-name", "What clients call it; may be repeated."),
    ] = None
    request_metrics: Annotated[
        str | None,
        _option(
            _SERVER,
            "--per-request-spec-decode-metrics",
            "What a reply says of speculation: none, summary or detailed.",
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        _option(
            _SERVER, "--otlp-traces-endpoint", "Send a span of each request there; see the docs."
        ),
    ] = None


@dataclass(frozen=True)
class AccessOptions:
    """Whom it lets in."""

    api_key_file: Annotated[
        Path | None,
        _option(_ACCESS, "--api-key-file", "Keys, one a line; also FOREDRAFT_API_KEY."),
    ] = None
    allow_no_key: Annotated[
        bool, _option(_ACCESS, "--allow-no-key", "Serve other machines without any key.")
    ] = False
    allowed_hosts: Annotated[
        list[str] | None,
        _option(_ACCESS, "--allowed-host", "A name the server goes by; may be repeated."),
    ] = None
    cors_origins: Annotated[
        list[str] | None,
        _option(_ACCESS, "--cors-origin", "Web pages that may call it; may be repeated."),
    ] = None
    ssl_certfile: Annotated[Path | None, _option(_ACCESS, "--ssl-certfile", "For https.")] = None
    ssl_keyfile: Annotated[Path | None, _option(_ACCESS, "--ssl-keyfile", "For https.")] = None
    share_between_keys: Annotated[
        bool,
        _option(_ACCESS, "--share-between-keys", "Text of one key may draft for another."),
    ] = False


@dataclass(frozen=True)
class LimitOptions:
    """How long it waits, and for how many."""

    max_waiting: Annotated[
        int | None, _option(_LIMITS, "--max-waiting", "Requests that may wait; others get 429.")
    ] = None
    request_timeout: Annotated[
        float | None, _option(_LIMITS, "--request-timeout", "Seconds of a reply.")
    ] = None
    drain_timeout: Annotated[
        float | None, _option(_LIMITS, "--drain-timeout", "Seconds that replies have to end.")
    ] = None


@o.with_option_objects
def serve(
    running: o.ModelOptions,
    draft: o.DraftOptions,
    server: ServerOptions,
    access: AccessOptions,
    limits: LimitOptions,
    max_batch_size: Annotated[
        int, _option(_SERVER, "--max-batch-size", "Most requests in one step.")
    ] = 16,
    max_step_tokens: o.MaxStepTokens = None,
    log_requests: Annotated[
        bool, _option(_SERVER, "--log-requests", "A line of JSON for each, without its text.")
    ] = False,
    trace: o.TraceTo = None,
) -> None:
    """Serve the model to OpenAI's and Anthropic's clients, and a page to look at it.

    Whatever is not given here comes from the environment, as FOREDRAFT_PORT or
    FOREDRAFT_MAX_BODY_BYTES do; docs/operate/server.md lists all.

    Examples:

        foredraft serve

        foredraft serve --model HuggingFaceTB/SmolLM2-360M-Instruct --port 8080

        foredraft serve --host 0.0.0.0 --api-key-file keys.txt
    """
    settings = _settings(server, access, limits)
    _check_certificate(settings)
    sizes = {"max_batch_size": max_batch_size, "max_step_tokens": max_step_tokens}
    asked = o.load_options(running, draft, **sizes)
    if log_requests:
        logging.getLogger("foredraft.server.access").setLevel(logging.INFO)
    with _traced(asked, trace) as load:
        _run(load, settings)


def _run(load: LoadModel, settings: ServerSettings) -> None:
    """Serve until somebody ends it."""
    from foredraft.server.app import create_app
    from foredraft.server.run import new_server

    def ended_or_ready(context: ServerContext) -> None:
        if context.failure is not None:
            server.should_exit = True
        elif context.is_ready:  # and not told to end meanwhile
            server.when_listening(partial(_greet, context))

    app = create_app(load, settings, ended_or_ready)
    server = new_server(app)
    server.run()
    failure = app.state.context.failure
    if failure is not None:
        raise failure
    if not server.started:
        sys.exit(1)


@contextmanager
def _traced(asked: LoadOptions, path: Path | None) -> Iterator[LoadModel]:
    """What loads the model; its steps are written to ``path``, if there is one."""
    from foredraft.trace.files import TraceFile

    with ExitStack() as stack:
        file = stack.enter_context(TraceFile(path)) if path is not None else None

        def load(feed: StepFeed) -> LLM:
            if file is None:
                return o.load_llm(asked, trace=feed)
            tracer = file.tracer()
            feed.wants_evidence = True
            feed.add(tracer)
            llm = o.load_llm(asked, trace=feed)
            o.begin_trace(file, tracer, llm)
            return llm

        yield load


def _settings(*groups: ServerOptions | AccessOptions | LimitOptions) -> ServerSettings:
    """The settings of command line and environment.

    Raises:
        ConfigError: a value that cannot be used, or the packages are not installed.
    """
    try:
        from pydantic import ValidationError

        from foredraft.server.settings import ServerSettings
    except ImportError as error:
        raise ConfigError(
            f"the server needs {error.name}, which is not here: pip install 'foredraft[server]'"
        ) from error
    given = {name: value for group in groups for name, value in _given(group).items()}
    try:
        return ServerSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        flags = {field: flag for group in groups for field, flag in o.flags(type(group)).items()}
        where = flags[name] if name in given else f"FOREDRAFT_{name.upper()}"
        value = first.get("input")
        known = re.findall(r"'(\w+)'", str(first.get("ctx", {}).get("expected", "")))
        problem = f"{where} is {value!r:.100}: {first['msg'].lower()}"
        raise ConfigError(problem + nearest(str(value), known)) from None


def _given(group: ServerOptions | AccessOptions | LimitOptions) -> dict[str, Any]:
    """What the command line says: the rest is left to the environment."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(group).items()
        if value is not None and value is not False and value != []
    }


def _check_certificate(settings: ServerSettings) -> None:
    """Before a model is loaded.

    Raises:
        ConfigError: certificate or key cannot be used.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile is of no use without --ssl-certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # those of ssl are, too
        files = f"--ssl-certfile {certificate}" + (f", --ssl-keyfile {key}" if key else "")
        raise ConfigError(f"{files}: {error.strerror or error}") from error


def _greet(context: ServerContext, address: str) -> None:
    names, llm = context.model_names, context.llm
    console = Console(stderr=True)
    console.print(
        f"Serving [bold]{names[0]}[/bold] with drafter {llm.drafter_name}", soft_wrap=True
    )
    console.print(f"  page       {address}/", soft_wrap=True)
    console.print(f"  OpenAI     {address}/v1", soft_wrap=True)
    console.print(f"  Anthropic  {address}", soft_wrap=True)
    if not context.keys:
        console.print("  no API key is set: whoever can connect may use it", soft_wrap=True)
