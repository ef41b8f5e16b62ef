"""The `foredraft` command."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from typing import Annotated

import typer
from rich.console import Console

from foredraft.cli import (
    bench,
    chat,
    demo,
    doctor,
    drafters,
    export,
    generate,
    index,
    serve,
    trace,
    train,
    tune,
)
from foredraft.cli.run_batch import run_batch_file
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.kernels.threads import spin_briefly
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


for command in (generate.generate, chat.chat, serve.serve, doctor.doctor, demo.demo, export.export):
    app.command()(command)
app.command("run-batch")(run_batch_file)
app.command("drafters")(drafters.list_drafters)
for group, name in (
    *((bench.app, "bench"), (index.app, "index"), (trace.app, "trace")),
    *((train.app, "train"), (tune.app, "tune")),
):
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command line; a foreseen error is one clear line.

    Exit status: 2 for options and values that cannot be used, 1 for other errors, 130 after
    Ctrl-C, 141 when the reader of our output has gone.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    spin_briefly()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ForedraftError as error:
        _say(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except OSError as error:
        if error.filename is not None:  # a path that somebody gave
            _say(f"{error.filename}: {error.strerror}")
            sys.exit(2)
        _drop_output()  # such as a full disk behind it
        _say(str(error))
        sys.exit(1)


def _say(problem: str) -> None:
    problem = re.sub(r"(\S{100})\S{100,}", r"\1…", problem)  # names that nobody would read
    Console(stderr=True).print(f"error: {problem}", style="red", markup=False, soft_wrap=True)


def _drop_output() -> None:
    """What is still buffered cannot be written, and must not be tried again at the end."""
    with contextlib.suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
