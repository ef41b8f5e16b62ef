"""`foredraft serve`: the model behind OpenAI's and Anthropic's interfaces, and a page."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import ssl
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options as o
from foredraft.cli.cluster import ClusterAsked
from foredraft.cli.display import loaded_drafters, megabytes, say
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions
from foredraft.server.settings import ServerSettings

if TYPE_CHECKING:
    from foredraft.server.app import LoadModel
    from foredraft.server.context import ServerContext

_INTERRUPTED = 130
_SWITCH_SECONDS = 5e-4
"""Time after which a thread that reads a large request lets the engine's go on. A step asks for the
interpreter's lock behind each call of a kernel; Python's usual 5 ms made 10 to 60 of a step."""
_LOADING = o.model(
    *("max_batch_size", "cache_memory"),
    shown=("model", "drafter", "draft_model", "weights", "max_context"),
    defaults={"max_batch_size": 16},
    samples=True,
)


_SETTINGS = o.Derived(
    "Server",
    flags=(
        *("host", "port", "page", "api_key_file", "allow_no_key", "allowed_hosts", "cors_origins"),
        *("share_between_keys", "ssl_certfile", "ssl_keyfile", "served_model_names"),
        *("request_metrics", "reasoning_content", "prove_every", "otlp_traces_endpoint"),
        *("allow_priority", "max_waiting", "request_timeout"),
    ),
    shown=("host", "port", "api_key_file", "served_model_names"),
    section="server",
    names={"request_metrics": "--per-request-spec-decode-metrics"},
)


@o.with_options
def serve(
    load: Annotated[LoadOptions, _LOADING],
    settings: Annotated[ServerSettings, _SETTINGS],
    cluster: Annotated[ClusterAsked, o.Derived("Cluster", shown=())],
    log_requests: Annotated[
        bool,
        typer.Option(
            "--log-requests",
            help="A line of JSON for each, without its text.",
            rich_help_panel="Server",
            hidden=True,
        ),
    ] = False,
    trace: o.TraceTo = None,
) -> None:
    """Serve the model to OpenAI's and Anthropic's clients, and a page to look at it.

    Settings that are not given here are read from the environment, such as FOREDRAFT_PORT or
    FOREDRAFT_MAX_BODY_BYTES, then from ~/.config/foredraft/config.toml; docs/operate/server.md
    lists all.

    Examples:

        foredraft serve

        foredraft serve --model HuggingFaceTB/SmolLM2-360M-Instruct --port 8080

        foredraft serve --host 0.0.0.0 --api-key-file keys.txt

        foredraft serve --ray --replicas 2
    """
    _check_certificate(settings)
    if cluster.ray:
        if log_requests or trace is not None:
            raise ConfigError(
                "--log-requests and --trace write where an engine runs: not with --ray"
            )
        with contextlib.suppress(KeyboardInterrupt), cluster.serving(load, settings):
            say(f"Serving {load.model} at {settings.address(settings.port)}/v1", stderr=True)
            threading.Event().wait()  # until Ctrl-C or SIGTERM
        return
    logging.getLogger("foredraft.server.reading").setLevel(logging.INFO)
    if log_requests:
        logging.getLogger("foredraft.server.access").setLevel(logging.INFO)
    with o.tracing(trace) as load_llm:
        _run(partial(load_llm, load), settings)


def _run(load: LoadModel, settings: ServerSettings) -> None:
    from foredraft.server.app import create_app
    from foredraft.server.run import bind, new_server

    def ended_or_ready(context: ServerContext) -> None:
        if context.failure is not None:
            server.should_exit = True
        elif context.is_ready:  # and not told to end meanwhile
            gc.freeze()  # a model is for ever: looking for garbage in it takes 0.1 s
            _greet(context, settings.address(listening.getsockname()[1]))

    sys.setswitchinterval(_SWITCH_SECONDS)
    app = create_app(load, settings, ended_or_ready)
    server, listening = new_server(app), bind(settings)
    try:
        server.run(sockets=[listening])
    finally:
        if app.state.context.is_loading:  # nothing can stop the thread that loads
            os._exit(_INTERRUPTED)
    failure = app.state.context.failure
    if failure is not None:
        raise failure
    if not server.started:
        sys.exit(1)


def _check_certificate(settings: ServerSettings) -> None:
    """Before a model is loaded.

    Raises:
        ConfigError: certificate or key cannot be used.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise ConfigError("ssl_keyfile is of no use without ssl_certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # those of ssl are, too
        files = f"ssl_certfile {certificate}" + (f", ssl_keyfile {key}" if key else "")
        raise ConfigError(f"{files}: {error.strerror or error}") from error


def _greet(context: ServerContext, address: str) -> None:
    from foredraft.llm import LLM

    llm = context.llm
    drafter = loaded_drafters(llm) if isinstance(llm, LLM) else llm.drafter_name
    lines = [
        f"Serving {context.model_names[0]} with drafter {drafter}",
        *([f"  page       {address}/"] if context.settings.has_page else []),
        f"  OpenAI     {address}/v1",
        f"  Anthropic  {address}",
    ]
    if isinstance(llm, LLM) and llm.plan is not None:
        taken = megabytes(llm.plan.to_come_bytes)
        most = "any amount" if llm.cache_bytes is None else megabytes(llm.cache_bytes)
        lines.append(f"  memory     {taken} for weights and work, up to {most} for the cache")
    if not context.keys:
        lines.append("  no API key is set: whoever can connect may use it")
    say("\n".join(lines), stderr=True)
