"""Trained heads side by side, and a picture of their trainings: loss and acceptance over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import safe_open

from benchmarks.plots import check_plot, plot_curves
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.drafters.text.table import BOTH, KIND
from foredraft.drafters.trained import WEIGHTS, read_info
from foredraft.train.acceptance import tokens_a_step
from foredraft.train.folder import read_curves, shares
from foredraft.train.table import BY_DEPTH, COPIES, TABLE

_MADE = {
    "head": "{name}",
    "kind": "{kind}",
    "params": "{millions:.1f}M",
    "tokens": "{thousands:.0f}k",
    "min": "{minutes:.1f}",
    "tokens/step": "{committed_greedy:.2f}",
    "at T=1": "{committed_sampled:.2f}",
    "rises": "{rises}",
}
_REACHED = {"head": "{name}", "greedy by depth": "{of_greedy}", "at T=1": "{of_sampled}"}
_EXPLAINED = (
    "tokens/step: tokens that a chain of drafts would commit.",
    "by depth: right where all before it were, on replies that no training has seen.",
)


def curves(
    heads: Annotated[list[Path], typer.Argument(help="Folders of heads and tables.")],
    plot: Annotated[str | None, typer.Option(help="Draw the curves into this PNG.")] = None,
    output: o.Output = None,
) -> None:
    """Compare trained heads: size, text, acceptance by depth, and whether it still rises."""
    check_plot(plot)
    check_outputs(output)
    rows = [row for folder in heads for row in compared(folder)]
    rows.sort(key=lambda row: -row.get("committed_greedy", 0.0))
    drawn = {folder.name: lines for folder in heads if (lines := _lines(folder))}
    if plot and not drawn:
        raise ConfigError("none of these folders has training/curves.jsonl to draw")
    if plot:
        plot_curves(drawn, plot)
    shown = [_shown(row) for row in rows]
    tables = [Table("", shown, columns) for columns in (_MADE, _REACHED)]
    Report(tables, {"heads": rows}, _EXPLAINED).give(output)


def compared(folder: Path) -> Iterator[dict[str, Any]]:
    """The figures of a head, or of a table, copies from the text, and both."""
    info = read_info(folder)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    row = {"name": folder.name, "kind": info.kind, "parameters": sum(map(math.prod, sizes))}
    if info.kind != KIND:
        measured = {name: value for name, value in info.measured.items() if name != "score"}
        made = info.provenance
        row |= {"tokens": made.get("tokens learnt from"), "minutes": made.get("minutes")}
        yield row | {"still_rises": _still_rises(_lines(folder))} | measured
        return
    names = {TABLE: folder.name, COPIES: "copies", BOTH: f"{folder.name} + copies"}
    for source, greedy in info.measured["greedy"].get(BY_DEPTH, {}).items():
        learnt = {} if source != COPIES else {"parameters": 0}
        acceptance = {"greedy": greedy, "committed_greedy": tokens_a_step(greedy)}
        yield row | {"name": names[source], "still_rises": False} | learnt | acceptance


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "training" / "curves.jsonl"
    return read_curves(path) if path.exists() else []


def _still_rises(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last fifth of a training made the head better: it would gain from more."""
    tests = [line for line in lines if "score" in line]
    early = [t["score"] for t in tests[:-1] if t["tokens"] <= 0.8 * tests[-1]["tokens"]]
    return bool(early) and tests[-1]["score"] > 1.005 * max(early)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "millions": row["parameters"] / 1e6,
        "thousands": (row.get("tokens") or 0) / 1e3,
        "rises": "yes" if row["still_rises"] else "",
        "of_greedy": shares(row.get("greedy", ()), 2),
        "of_sampled": shares(row.get("sampled", ()), 2),
    }
