"""Figures as a table on the terminal and as a file that says where they come from."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from foredraft.core.errors import ConfigError
from foredraft.kernels.instructions import SWITCH
from foredraft.system.machine import describe_machine


@dataclass(frozen=True)
class Table:
    """Rows of figures.

    Attributes:
        name: the key of the rows in the file; empty: they are on the terminal only.
        rows: each a mapping of names to plain values. A row with a ``failure`` has no figures; its
            ``name`` and the failure are printed below the table.
        columns: title of each column that the terminal shows, with a format string for the values
            of a row, such as ``"{speedup:.2f}x"``. None of them: the rows are in the file only.
        title: printed above the table.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str] = field(default_factory=dict)
    title: str | None = None


@dataclass(frozen=True)
class Report:
    """The result of a measurement, to be printed and written to a JSON file.

    Attributes:
        facts: single values, which the file holds beside the tables.
        lines: sentences that the terminal shows below the tables.
        seed: of the sampling.
    """

    tables: Sequence[Table] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    seed: int = 0

    def show(self) -> None:
        from rich.console import Console

        console = Console(highlight=False)
        failures: list[str] = []
        for table in self.tables:
            if table.columns:
                console.print(_drawn(table))
                failures += [f"{r['name']}: {r['failure']}" for r in table.rows if "failure" in r]
        for line in (*dict.fromkeys(failures), *self.lines):
            console.print(line, markup=False, soft_wrap=True)

    def as_dict(self) -> dict[str, Any]:
        """The facts and the rows of each table."""
        named = {each.name: [*map(dict, each.rows)] for each in self.tables if each.name}
        return {**self.facts, **named}

    def give(self, output: str | None = None, *, as_json: bool = False) -> None:
        """Print it, and write it to a file if one is named.

        Args:
            as_json: print the figures as one JSON object, not as tables.

        Raises:
            ConfigError: the file cannot be written.
        """
        if as_json:
            sys.stdout.write(_json(self.as_dict(), self.seed) + "\n")
        else:
            self.show()
        if output:
            write_json(output, self.as_dict(), self.seed)


def _drawn(table: Table) -> Any:
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(title=table.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    numeric = {title for title, form in table.columns.items() if ":" in form}
    for title in table.columns:
        justify: Literal["right", "left"] = "right" if title in numeric else "left"
        drawn.add_column(title, justify=justify, overflow="fold")
    for row in table.rows:
        if "failure" not in row:
            drawn.add_row(*(Text(_cell(form, row)) for form in table.columns.values()))
    return drawn


def _cell(form: str, row: Mapping[str, Any]) -> str:
    """A value as its column shows it; empty where the row has none."""
    try:
        return form.format_map({name: value for name, value in row.items() if value is not None})
    except KeyError:
        return ""


def _json(figures: Mapping[str, Any], seed: int, indent: int | None = None) -> str:
    """Figures behind command, revision, versions, machine, threads, seed and time."""
    made = {
        "command": _command(),
        "revision": _revision(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "machine": describe_machine(),
    }
    return json.dumps(made | dict(figures), default=str, indent=indent)


def _command() -> str:
    """The command line, and the kernels' environment variable if it was set."""
    switched = [f"{SWITCH}={os.environ[SWITCH]}"] if os.environ.get(SWITCH) else []
    is_module = Path(sys.argv[0]).name == "__main__.py"
    program = ["python", "-m", Path(sys.argv[0]).parent.name] if is_module else ["foredraft"]
    return shlex.join([*switched, *program, *sys.argv[1:]])


def _revision() -> str | None:
    """The git revision of this source tree, marked when it has changes; None outside of one."""
    root = Path(__file__).parents[2]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def check_outputs(*paths: str | Path | None) -> None:
    """Find out before a long measurement whether its results can be kept.

    Raises:
        ConfigError: a file's folder is not there.
    """
    for path in paths:
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")


def write_json(path: str, figures: dict[str, Any], seed: int) -> None:
    """Write figures and their provenance.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(_json(figures, seed, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
