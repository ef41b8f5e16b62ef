"""`foredraft train compare`: heads side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.train.comparison import ComparedHead


def compare(
    heads: Annotated[list[Path], typer.Argument(help="Folders of heads and tables, of any kinds.")],
    plot: Annotated[
        str | None, typer.Option(help="Draw their curves over tokens seen to this file.")
    ] = None,
    json_file: o.JsonFile = None,
) -> None:
    """Trained heads side by side: size, text, acceptance by depth, and whether it still rises.

    foredraft train compare heads/* --plot heads.png
    """
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.train.comparison import read_compared
    from foredraft.train.curves import draw_curves

    check_outputs(json_file, plot)
    found = [head for folder in heads for head in read_compared(folder)]
    found.sort(key=lambda head: -head.measured["committed_greedy"])
    console = Console(highlight=False)
    console.print(_table(found))
    console.print(
        "by depth: right where all before it were, on replies that no training has seen; "
        "tokens a step: what a chain of so many would commit",
        style="dim",
        soft_wrap=True,
    )
    if plot is not None:
        drawn = {head.name: head.curves for head in found if head.curves}
        if not drawn:
            raise ConfigError("none of these folders has training/curves.jsonl to draw")
        draw_curves(drawn, plot)
    if json_file is not None:
        write_json(json_file, {"heads": [head.as_dict() for head in found]}, 0)


def _table(heads: list[ComparedHead]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("head")
    for title in (
        "kind", "params", "tokens", "min", "greedy by depth", "at T=1", "tokens/step", "at T=1",
        "still rises",
    ):  # fmt: skip
        table.add_column(title, justify="right")
    for head in heads:
        made, measured = head.made, head.measured
        table.add_row(
            head.name,
            head.kind,
            f"{head.parameters / 1e6:.1f}M",
            f"{made.get('tokens learnt from', 0) / 1e3:.0f}k",
            f"{made.get('minutes', 0.0):.1f}",
            _shares(measured["greedy"]),
            _shares(measured.get("sampled", ())),
            f"{measured['committed_greedy']:.2f}",
            f"{measured['committed_sampled']:.2f}" if "committed_sampled" in measured else "",
            "yes" if head.still_rises else "",
        )
    return table


def _shares(values: Any) -> str:
    return " ".join(f"{value:.2f}".lstrip("0") for value in values)
