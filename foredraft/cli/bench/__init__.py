"""`foredraft bench …`: measurements as commands."""

from __future__ import annotations

import typer

from foredraft.cli.bench.busy import busy
from foredraft.cli.bench.drafters import drafters
from foredraft.cli.bench.grammar import grammar
from foredraft.cli.bench.memory import memory
from foredraft.cli.bench.prefix import prefix
from foredraft.cli.bench.prompts import prompts
from foredraft.cli.bench.quality import quality
from foredraft.cli.bench.report import report
from foredraft.cli.bench.serve_clients import serve_clients
from foredraft.cli.bench.serve_load import serve_load
from foredraft.cli.bench.serve_sim import serve_sim
from foredraft.cli.bench.serve_stream import serve_stream
from foredraft.cli.bench.step import step
from foredraft.system.timing_lock import measuring

app = typer.Typer(no_args_is_help=True, help="Measure on this machine: interleaved, with medians.")
_TIMES_NOTHING = ("report", "quality", "serve-load")


@app.callback()
def _alone(context: typer.Context) -> None:
    """Measure on this machine: interleaved, with medians. Trainings stand still meanwhile."""
    if context.invoked_subcommand not in _TIMES_NOTHING:
        context.with_resource(measuring(lambda text: typer.echo(text, err=True)))


COMMANDS = (
    *(drafters, step, prompts, busy, serve_sim, serve_load, serve_clients),
    *(serve_stream, prefix, grammar, quality, memory, report),
)
for command in COMMANDS:
    app.command()(command)
