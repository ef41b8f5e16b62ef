"""`foredraft bench …`: measurements as commands."""

from __future__ import annotations

import typer

from foredraft.cli.bench.drafters import drafters
from foredraft.cli.bench.memory import memory
from foredraft.cli.bench.quality import quality
from foredraft.cli.bench.report import report
from foredraft.cli.bench.step import step

app = typer.Typer(no_args_is_help=True, help="Measure on this machine: interleaved, with medians.")
for command in (drafters, step, quality, memory, report):
    app.command()(command)
