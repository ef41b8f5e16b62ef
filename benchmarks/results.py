"""Result files as one page: every figure beside its command, revision and machine.

`foredraft.bench.report.write_json` writes the files. A page is a function of them alone, so a test
can tell whether it is current.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.intervals import with_intervals
from foredraft.bench.report import check_outputs
from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError

_PROVENANCE = ("command", "revision", "date", "seed", "machine")
_RAW = ("trials",)
"""A record for each run, of which the file has summaries as well."""
_INTRODUCTION = """\
# Results

<!-- Written by `make reference` from the JSON files beside it. Do not edit: measure again. -->

Each table is one command's, with everything that says where it comes from. Times of different runs
are not comparable on machines that vary, and those of different machines never are. A command is
shown as it was typed at its revision; most of what was then `foredraft bench …` is
`python -m benchmarks …` now.
"""


def render(folder: str | Path) -> str:
    """The page of all result files of a folder, by name.

    Raises:
        ConfigError: there are none, or one is not a result file.
    """
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise ConfigError(
            f"{folder} holds no JSON files; write some with `python -m benchmarks … --output`"
        )
    return "\n".join([_INTRODUCTION, *(_section(path) for path in files)])


def _section(path: Path) -> str:
    report = _read(path)
    if {"overall", "trials"} <= report.keys():  # older files hold no intervals
        report["overall"] = with_intervals(report["overall"], report["trials"])
    figures = {name: value for name, value in report.items() if name not in _PROVENANCE}
    plain = {name: value for name, value in figures.items() if _is_cell(value)}
    parts = [f"## {path.stem}", _origin(report, path)]
    if plain:
        parts.append(_table([plain]))
    for name, value in figures.items():
        if name not in plain and name not in _RAW:
            rows = value if isinstance(value, list) else [value]
            parts.append(f"**{name}**\n\n{_table([_flat(row, path) for row in rows])}")
    return "\n\n".join(parts) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    missing = [n for n in _PROVENANCE if not isinstance(report, dict) or n not in report]
    if missing:
        raise ConfigError(
            f"{path} does not say its {', '.join(missing)}: it was not written by "
            "`python -m benchmarks … --output`"
        )
    found: dict[str, Any] = report
    return found


def _origin(report: Mapping[str, Any], path: Path) -> str:
    """Where the figures come from, one thing a line."""
    machine = report["machine"]
    hardware = [machine["cpu"], f"{machine['cores']} cores", f"{machine['threads']} threads"]
    hardware += [machine[name] for name in ("instructions", "gpu") if machine.get(name)]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        f"- `{report['command']}` (seed {report['seed']})",
        f"- revision {report['revision'] or 'unknown'}, {report['date']}",
        f"- {', '.join(hardware)}; {machine['platform']}",
        f"- {versions}",
        f"- all figures: [`{path.name}`]({path.name})",
    ]
    return "\n".join(lines)


def _flat(row: Any, path: Path) -> dict[str, Any]:
    """A record with the figures of its parts behind its own."""
    flat: dict[str, Any] = {}
    for name, value in row.items() if isinstance(row, Mapping) else ():
        if isinstance(value, Mapping):
            flat |= {f"{name}: {part}": each for part, each in value.items()}
        else:
            flat[name] = value
    if not flat or not all(map(_is_cell, flat.values())):
        raise ConfigError(f"{path} holds {shown(row)}, which is no row of a table")
    return flat


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "(none)"
    titles = list(dict.fromkeys(title for row in rows for title in row))
    body = [[_cell(row.get(title)) for title in titles] for row in rows]
    rule = ["---:" if isinstance(rows[0].get(title), int | float) else "---" for title in titles]
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, rule, *body))


def _is_cell(value: Any) -> bool:
    """A figure, or some of them."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, int | float) for each in value)
    return value is None or isinstance(value, str | int | float)


def _cell(value: Any) -> str:
    """Four digits are more than any of our figures is good for."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def report(
    folder: Annotated[Path, typer.Argument(help="Where the files of `--output` lie.")],
    into: Annotated[
        Path | None, typer.Option(help="Write the page to this file instead of showing it.")
    ] = None,
) -> None:
    """One Markdown page of all result files: each figure with its command, revision and machine."""
    page = render(folder)
    if into is None:
        typer.echo(page, nl=False)
        return
    check_outputs(str(into))
    into.write_text(page)
