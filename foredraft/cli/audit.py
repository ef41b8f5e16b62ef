"""`foredraft audit`: is speculation lossless here?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.audit.options import AuditOptions, ServerOptions
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions

if TYPE_CHECKING:
    from foredraft.audit.report import AuditReport

_LOADED = o.model(defaults={"max_batch_size": 16}, shown=("model", "drafter", "draft_model"))
_SAMPLED = o.sampling("coupling", shown=("temperature",), temperature=0.8, max_tokens=96, seed=0)
_AUDIT = o.Derived(
    "Audit",
    flags=("prompts", "detect", "time_limit", "plant_faults"),
    shown=("prompts", "detect", "time_limit"),
)
_SERVER = o.Derived(
    "Somebody's server",
    without=("seed",),
    flags=("endpoint", "plain_endpoint", "served_model", "keep"),
    shown=("endpoint",),
)


@o.with_options
def audit(
    load: Annotated[LoadOptions, _LOADED],
    params: Annotated[SamplingParams, _SAMPLED],
    options: Annotated[AuditOptions, _AUDIT],
    server: Annotated[ServerOptions, _SERVER],
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="FOREDRAFT_AUDIT_KEY",
            help="Sent to servers as a bearer token.",
            rich_help_panel="Somebody's server",
            hidden=True,
        ),
    ] = None,
    as_json: o.Json = False,
    output: o.Output = None,
) -> None:
    """Find out whether speculation is lossless here: this model, drafter and parameters.

    Replies are generated with drafts, and each token is scored again without. Known mistakes are
    planted to show that the audit would find them. See docs/operate/audit.md.

    Exit status: 0 nothing found, with the power that was asked for; 1 different; 2 it cannot be
    used; 3 inconclusive.

    Examples:

        foredraft audit

        foredraft audit --drafter blend --temperature 0.8 --coupling drawn --output audit.json

        foredraft audit --endpoint http://127.0.0.1:8000 --keep answers.jsonl
    """
    from foredraft.bench.report import check_outputs

    check_outputs(output)
    if server.endpoint is None:
        report = _own(load, params, options)
    else:
        report = _of_server(replace(server, seed=params.seed or 0), options, api_key)
    report.give(output, as_json=as_json)
    raise typer.Exit(report.exit_code)


def _own(load: LoadOptions, params: SamplingParams, options: AuditOptions) -> AuditReport:
    from foredraft.audit.own import OwnAudit
    from foredraft.cli.display import RichProgress

    if load.drafter == "none":
        raise ConfigError("--drafter none drafts nothing, so there is nothing to audit")
    llm = o.load_llm(load)
    with RichProgress() as progress:
        return OwnAudit(llm, params, options, progress).report()


def _of_server(server: ServerOptions, options: AuditOptions, api_key: str | None) -> AuditReport:
    from foredraft.audit.servers import Endpoint, ServerAudit, connect
    from foredraft.cli.display import RichProgress

    assert server.endpoint is not None
    keeps = server.keep is not None
    endpoint = Endpoint(connect(server.endpoint, api_key), server.served_model, keeps)
    plain = None
    if server.plain_endpoint is not None:
        plain = Endpoint(connect(server.plain_endpoint, api_key), server.served_model, keeps)
    with RichProgress() as progress:
        return ServerAudit(endpoint, plain, options, server, progress).report()
