"""The `foredraft` command."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from foredraft.cli import bench, chat, demo, doctor, generate, index, tune
from foredraft.core.errors import ForedraftError
from foredraft.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Exact speculative decoding: your model's own text, faster, with nothing changed."""


for command in (generate.generate, chat.chat, doctor.doctor, demo.demo):
    app.command()(command)
for group, name in ((bench.app, "bench"), (index.app, "index"), (tune.app, "tune")):
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command line; a foreseen error is one clear line and exit status 1."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        app()
    except ForedraftError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        sys.exit(141)
