"""`foredraft trace`: show a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.trace.files import Trace
    from foredraft.trace.format import Candidate, Committed, NodeLaw, TracedRow, TracedStep, Why


@o.with_options
def trace(
    file: Annotated[Path, typer.Argument(help="Written with --trace.")],
    request: Annotated[int | None, typer.Option(help="Only this request of the trace.")] = None,
    step: Annotated[int | None, typer.Option(help="Show this step in full.")] = None,
    as_json: o.Json = False,
) -> None:
    """Show what a run did, step by step.

    With --step one step in full: the tree, the target's probabilities, the test, the residual. The
    page of `foredraft serve` shows both, and where the time went.

    Examples:

        foredraft generate --chat "Name three rivers." --trace run.jsonl

        foredraft trace run.jsonl

        foredraft trace run.jsonl --step 5

        foredraft trace run.jsonl --json
    """
    found, console = _read(file, request), Console(highlight=False)
    if as_json:
        for each in (found.run, *found.steps):
            typer.echo(each.model_dump_json())
    elif step is None:
        show_run(console, found)
    else:
        show_step(console, _step(found, step))


def _step(trace: Trace, number: int) -> TracedStep:
    for step in trace.steps:
        if step.step == number:
            return step
    last = trace.steps[-1].step if trace.steps else None
    raise ConfigError(f"the trace has no step {number}; the last one is {last}")


def _read(file: Path, request: int | None) -> Trace:
    from dataclasses import replace

    from foredraft.trace.files import read_trace

    trace = read_trace(file)
    if request is None:
        return trace
    if request not in trace.request_ids:
        raise ConfigError(
            f"the trace has no request {request}; it has {', '.join(map(str, trace.request_ids))}"
        )
    steps = [
        step.model_copy(update={"rows": tuple(r for r in step.rows if r.request_id == request)})
        for step in trace.steps
    ]
    return replace(trace, steps=tuple(step for step in steps if step.rows))


# ---------------------------------------------------------------------- how a trace looks


_ACCEPTED = "✓"
_STYLES = {"draft": "underline green", "correction": "bold yellow", "bonus": "blue"}
"""By shape and colour: who wrote a token."""


def show_run(console: Console, trace: Trace) -> None:
    """The text of each request, and a line a step."""
    run = trace.run
    parts = (run.model, run.drafter and f"drafter {run.drafter}", run.started)
    console.print(", ".join(filter(None, parts)), style="bold", markup=False)
    for request_id in trace.request_ids:
        console.print(Rule(f"request {request_id}", align="left", style="dim"))
        console.print(_text(trace, request_id), soft_wrap=True)
    console.print(_legend())
    table = Table("step", box=None, padding=(0, 2, 0, 0))
    table.add_column(f"draft ({_ACCEPTED} accepted)", ratio=1, overflow="fold")
    table.add_column("then")
    for title in ("accepted", "ms"):
        table.add_column(title, justify="right")
    for step in trace.steps:
        for row in step.rows:
            table.add_row(
                str(step.step),
                _draft(row),
                _then(row),
                f"{row.num_accepted}/{len(row.draft.tokens)}",
                f"{step.times.total_ms:.1f}",
            )
    console.print(table)
    _show_preempted(console, trace.steps)


def _show_preempted(console: Console, steps: Sequence[TracedStep]) -> None:
    """Steps with preemptions, which explain a long step by a lack of memory."""
    short = [step for step in steps if step.num_preempted]
    if short:
        number = sum(step.num_preempted for step in short)
        places = ", ".join(str(step.step) for step in short)
        console.print(
            f"{number} times a request gave its place in the cache away, before step {places}",
            style="yellow",
        )


def show_step(console: Console, step: TracedStep) -> None:
    """One step in full: the tree, what the target said, the test, the residual."""
    t = step.times
    console.print(
        f"step {step.step}: draft {t.draft_ms:.2f} ms, score {t.score_ms:.2f}, "
        f"verify {t.verify_ms:.2f}, learn {t.learn_ms:.2f}",
        style="bold",
    )
    _show_preempted(console, [step])
    for row in step.rows:
        about = f"request {row.request_id}, position {row.position}, budget {row.budget}"
        console.print(Rule(about, align="left", style="dim"))
        if row.kind is None:
            console.print(f"{row.num_read} tokens of the prompt were read")
            continue
        console.print(_tree(row))
        if row.why is not None:
            console.print(_why(row, row.why))
        console.print(Text.assemble("committed: ", *map(_token, row.committed)))


def _text(trace: Trace, request_id: int) -> Text:
    rows = [row for step in trace.steps for row in step.rows if row.request_id == request_id]
    return Text.assemble(*[_token(token) for row in rows for token in row.committed])


def _token(token: Committed) -> tuple[str, str]:
    return token.text, _STYLES[token.by]


def _legend() -> Text:
    return Text.assemble(
        ("accepted draft", _STYLES["draft"]),
        ("  ", ""),
        ("correction", _STYLES["correction"]),
        ("  ", ""),
        ("bonus", _STYLES["bonus"]),
    )


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


def _then(row: TracedRow) -> Text:
    last = row.committed[-1:]
    if not last or last[0].by == "draft":
        return Text("")
    return Text(_shown(last[0].text), style=_STYLES[last[0].by])


def _tree(row: TracedRow) -> Tree:
    draft = row.draft
    top = Tree(Text("text so far", style="dim"))
    below = {-1: top}
    for node, parent in enumerate(draft.parents):
        sign = _ACCEPTED if node in row.path else ""
        line = Text(sign + _shown(draft.texts[node]))
        line.stylize(_STYLES["draft"] if node in row.path else "dim")
        for name, values in (
            ("target", draft.target_probs),
            ("drafted with", draft.draft_probs),
            ("drafter's guess", draft.own_chances),
        ):
            if values is not None and (value := values[node]) is not None:
                line.append(f"  {name} {value:.4g}", style="dim")
        if draft.authors is not None:
            line.append(f"  {draft.authors[node]}", style="dim")
        below[node] = below[parent].add(line)
    return top


def _why(row: TracedRow, why: Why) -> Group:
    head = Text(f"rule {why.rule}, temperature {why.temperature:g}, seed {why.seed}", style="dim")
    parts: list[Text | Table] = [head]
    for law in why.laws:
        if law.taken is not None:
            parts.append(_law(row, law))
    for made in why.decisions:
        verb = "accepted" if made.accepted else "rejected"
        sign = "<" if made.accepted else "≥"
        where = _shown(row.draft.texts[made.node]) if made.node >= 0 else "the text so far"
        parts.append(
            Text(f"up to {where}: u = {made.uniform:.4f} {sign} {made.probability:.4f}: {verb}")
        )
    if why.residual:
        shown = ", ".join(f"{_shown(r.text)} {r.prob:.3g}" for r in why.residual)
        parts.append(Text(f"next token drawn from: {shown}"))
    return Group(*parts)


def _law(row: TracedRow, law: NodeLaw) -> Table:
    after = _shown(row.draft.texts[law.node]) if law.node >= 0 else "the text so far"
    table = Table(title=f"after {after}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    has_noise = any(c.noise is not None for c in law.candidates)
    columns = ["token", "target", "at temperature 1"]
    columns += ["log p + noise"] if has_noise else []
    columns += ["drafted with"] if any(c.draft_prob is not None for c in law.candidates) else []
    for title in columns:
        table.add_column(title, justify="left" if title == "token" else "right")
    for found in law.candidates:
        table.add_row(*_cells(found, has_noise), style="bold" if found.token == law.taken else "")
    return table


def _cells(found: Candidate, has_noise: bool) -> list[str]:
    cells = [_shown(found.text), f"{found.target_prob:.4g}", f"{found.model_prob:.4g}"]
    if has_noise:
        total = ""
        if found.noise is not None and found.target_prob > 0.0:
            p = log(found.target_prob)
            total = f"{p:.2f} {found.noise:+.2f} = {p + found.noise:.2f}"
        cells.append(total)
    if found.draft_prob is not None:
        cells.append(f"{found.draft_prob:.4g}")
    return cells


def _shown(text: str) -> str:
    """A token's text with its spaces and line ends to be seen."""
    return text.replace("\n", "⏎").replace(" ", "·") or "∅"
