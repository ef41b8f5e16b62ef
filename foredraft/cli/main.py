"""The `foredraft` command. A subcommand's module is imported when the subcommand runs."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.version import __version__

_SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Command(NamedTuple):
    """Where a subcommand is, and its line in ``foredraft --help``.

    Attributes:
        place: a module below `foredraft.cli` and the function or typer group in it.
        summary: the first sentence of its help.
    """

    place: str
    summary: str

    def load(self, name: str) -> Any:
        """Import it: a command as typer runs it."""
        module, _, attribute = self.place.partition(":")
        found = getattr(import_module(f"foredraft.cli.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            group = typer.Typer(add_completion=False, **_SETTINGS)
            group.command(name)(found)
            return typer.main.get_command(group)
        return typer.main.get_group(found)


COMMANDS = {
    "generate": Command(
        "generate:generate", "Continue a prompt; accepted draft tokens are underlined."
    ),
    "chat": Command("chat:chat", "Talk to a chat model."),
    "serve": Command(
        "serve:serve",
        "Serve the model to OpenAI's and Anthropic's clients, and a page to look at it.",
    ),
    "run-batch": Command(
        "run_batch:run_batch_file", "Answer a file of requests in OpenAI's batch format."
    ),
    "models": Command("models:app", "Download, list, describe or remove models."),
    "doctor": Command(
        "doctor:doctor",
        "Print the resolved plan: device, dtype, kernels, memory, and what is missing.",
    ),
    "demo": Command(
        "demo:demo",
        "Generate three replies plainly and speculatively, and show that they are identical.",
    ),
    "measure": Command(
        "measure:measure",
        "Measure whether speculation is faster here: with which drafter, under which load.",
    ),
    "audit": Command(
        "audit:audit",
        "Find out whether speculation is lossless here: this model, drafter and parameters.",
    ),
    "drafters": Command(
        "drafters:app", "List the drafters, show the options of one, or index text for one."
    ),
    "train": Command("train:app", "Train a drafter for a model of your own."),
    "trace": Command("trace:trace", "Show what a run did, step by step."),
}
RENAMED = {
    "bench": "foredraft measure, or python -m benchmarks in the repository",
    "export": "foredraft train export",
    "index": "foredraft drafters index",
    "plan": "foredraft measure",
    "tune": "foredraft measure",
    "tune self-draft": "foredraft train self-draft",
    "train compare": "python -m benchmarks curves in the repository",
    "train kinds": "foredraft drafters",
    "trace replay": "foredraft measure",
    "trace show": "foredraft trace FILE",
}
"""Earlier names of commands, and the commands that do their work."""


class _Commands(TyperGroup):
    """Lists the subcommands without importing them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.commands = {
            name: TyperCommand(name, help=each.summary) for name, each in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for old in (" ".join(args[:2]), args[0]):
            if old in RENAMED:
                raise ConfigError(f"foredraft {old} is now: {RENAMED[old]}")
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, stand_in and COMMANDS[str(name)].load(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand. An option that is a setting says how it is set."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            flag, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
            if flag is None or context is None:
                raise
            name = flag[2:].replace("-", "_").removeprefix("no_")
            if name in getattr(context.command.callback, "settable", ()):
                raise ConfigError(f"{flag} is a setting: write --set {name}=…") from None
            raise


app = typer.Typer(cls=_Commands, no_args_is_help=True, **_SETTINGS)


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


def main() -> None:
    """Run the command line."""
    exit_with_message(app)


def exit_with_message(program: Callable[[], object]) -> None:
    """Run a program; a foreseen error is one clear line.

    Exit status: 2 for options and values that cannot be used, 1 for other errors, 130 after
    Ctrl-C, 141 when the reader of our output has gone.
    """
    from foredraft.kernels.threads import spin_briefly

    _open_closed()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    spin_briefly()
    if isinstance(sys.stdout, TextIOWrapper):  # as stderr does: a model may write any character
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            program()
        finally:
            sys.stdout.flush()
    except ForedraftError as error:
        _complain(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except OSError as error:
        if error.filename is not None:  # a path given by the user
            _complain(f"{error.filename}: {error.strerror}")
            sys.exit(2)
        _drop_output()  # such as a full disk behind it
        _complain(str(error))
        sys.exit(1)


def _open_closed() -> None:
    """Open the null device for standard streams that the shell has closed, such as by ``<&-``.

    Python has None for them, and the next file that is opened would get their number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = open(os.devnull, mode, errors="backslashreplace")  # noqa: SIM115 - it stays open
            setattr(sys, name, null)


def _complain(problem: str) -> None:
    from foredraft.cli.display import say

    # thousands of names are too many to list
    problem = re.sub(r"(\S{100})\S{100,}", r"\1…", problem)
    say(f"error: {problem}", stderr=True, style="red")


def _drop_output() -> None:
    """Drop buffered output that cannot be written, so that it is not tried again at exit."""
    with contextlib.suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
