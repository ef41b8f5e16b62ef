"""`foredraft trace`: show a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.trace.files import Trace
    from foredraft.trace.format import Committed, TracedRow


_ACCEPTED = "✓"
_STYLES = {"draft": "underline green", "correction": "bold yellow", "bonus": "blue"}
"""By shape and colour: who wrote a token."""


@o.with_options
def trace(
    file: Annotated[Path, typer.Argument(help="Written with --trace.")],
    request: Annotated[int | None, typer.Option(help="Only this request of the trace.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all of it: a JSON object on each line.")
    ] = False,
) -> None:
    """Show what a run did, step by step.

    The page of `foredraft serve` shows each step in full as well (the tree, the target's
    probabilities, the test, the residual), and where the time went; --json prints all of it.

    Examples:

        foredraft generate --chat "Name three rivers." --trace run.jsonl

        foredraft trace run.jsonl

        foredraft trace run.jsonl --json
    """
    from foredraft.trace.files import read_trace

    found = read_trace(file)
    if request is not None:
        found = _only(found, request)
    if as_json:
        for each in (found.run, *found.steps):
            typer.echo(each.model_dump_json())
        return
    _show(Console(highlight=False), found)


def _only(trace: Trace, request: int) -> Trace:
    if request not in trace.request_ids:
        raise ConfigError(
            f"the trace has no request {request}; it has {', '.join(map(str, trace.request_ids))}"
        )
    steps = [
        step.model_copy(update={"rows": tuple(r for r in step.rows if r.request_id == request)})
        for step in trace.steps
    ]
    return replace(trace, steps=tuple(step for step in steps if step.rows))


def _show(console: Console, trace: Trace) -> None:
    run = trace.run
    named = dict.fromkeys(row.drafter or run.drafter for step in trace.steps for row in step.rows)
    drafters = ", ".join(filter(None, named))
    parts = (run.model, drafters and f"drafter {drafters}", run.started)
    console.print(", ".join(filter(None, parts)), style="bold", markup=False)
    for request_id in trace.request_ids:
        console.print(Rule(f"request {request_id}", align="left", style="dim"))
        rows = [row for step in trace.steps for row in step.rows if row.request_id == request_id]
        tokens = [(each.text, _STYLES[each.by]) for row in rows for each in row.committed]
        console.print(Text.assemble(*tokens), soft_wrap=True)
    kinds = [("accepted draft" if kind == "draft" else kind, s) for kind, s in _STYLES.items()]
    console.print(Text("  ").join(Text(name, style) for name, style in kinds))
    table = Table("step", box=None, padding=(0, 2, 0, 0))
    table.add_column(f"draft ({_ACCEPTED} accepted)", ratio=1, overflow="fold")
    table.add_column("then")
    for title in ("accepted", "ms"):
        table.add_column(title, justify="right")
    for step in trace.steps:
        for row in step.rows:
            accepted = f"{row.num_accepted}/{len(row.draft.tokens)}"
            ms = f"{step.times.total_ms:.1f}"
            table.add_row(str(step.step), _draft(row), _then(row.committed), accepted, ms)
    console.print(table)
    if short := [step for step in trace.steps if step.num_preempted]:  # it explains a long step
        number = sum(step.num_preempted for step in short)
        places = ", ".join(str(step.step) for step in short)
        said = f"{number} times a request gave its place in the cache away, before step {places}"
        console.print(said, style="yellow")


def _draft(row: TracedRow) -> Text:
    if row.kind is None:
        return Text(f"{row.num_read} tokens of the prompt", style="dim")
    if not row.draft.tokens:
        return Text("nothing", style="dim")
    lines = [_line(row, depth, nodes) for depth, nodes in branches(row.draft.parents)]
    return Text("\n").join(lines)


def branches(parents: Sequence[int]) -> list[tuple[int, list[int]]]:
    """A tree as lines: each a path of nodes from its depth downward.

    The first child of a node goes on in its line; every other child begins a line of its own below,
    the deepest first.
    """
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(parents))}
    for node, parent in enumerate(parents):
        children[parent].append(node)
    lines: list[tuple[int, list[int]]] = []

    def follow(node: int, depth: int) -> None:
        path, others = [node], list[tuple[int, int]]()
        lines.append((depth, path))
        while children[path[-1]]:
            first, *rest = children[path[-1]]
            others += [(each, depth + len(path)) for each in reversed(rest)]
            path.append(first)
        for each, below in reversed(others):
            follow(each, below)

    for root in children[-1]:
        follow(root, 0)
    return lines


def _line(row: TracedRow, depth: int, nodes: Sequence[int]) -> Text:
    words = [
        Text(_ACCEPTED + _shown(row.draft.texts[node]), style=_STYLES["draft"])
        if node in row.path
        else Text(_shown(row.draft.texts[node]), style="dim")
        for node in nodes
    ]
    return Text("  " * depth + ("└ " if depth else "")) + Text(" ").join(words)


def _then(committed: Sequence[Committed]) -> Text:
    if not committed or committed[-1].by == "draft":
        return Text("")
    return Text(_shown(committed[-1].text), style=_STYLES[committed[-1].by])


def _shown(text: str) -> str:
    """A token's text with its spaces and line ends to be seen."""
    return text.replace("\n", "⏎").replace(" ", "·") or "∅"
