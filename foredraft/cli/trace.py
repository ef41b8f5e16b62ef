"""`foredraft trace`: look at what a run did, and at what it would have done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.trace.files import Trace

_FEW = (0, 1, 2, 4, 8, 16)

app = typer.Typer(no_args_is_help=True, help="Look at what a run did, step by step.")
File = Annotated[Path, typer.Argument(help="Written with --trace.")]
Request = Annotated[int | None, typer.Option(help="Only this request of the trace.")]


@app.callback()
def _group() -> None:
    """Look at what a run did, step by step."""


@app.command()
def show(
    file: File,
    request: Request = None,
    step: Annotated[int | None, typer.Option(help="Why this step went as it did.")] = None,
) -> None:
    """Show a run: its text by who wrote it, and its steps; with --step, one of them in full.

    Examples:

        foredraft generate --chat "Name three rivers." --trace run.jsonl

        foredraft trace show run.jsonl

        foredraft trace show run.jsonl --step 5
    """
    from foredraft.cli.trace_display import show_run, show_step

    trace, console = _read(file, request), Console(highlight=False)
    if step is None:
        show_run(console, trace)
        return
    found = next((s for s in trace.steps if s.step == step), None)
    if found is None:
        last = trace.steps[-1].step if trace.steps else None
        raise ConfigError(f"the trace has no step {step}; the last one is {last}")
    show_step(console, found)


@app.command()
def replay(
    file: File,
    num_draft_tokens: Annotated[
        int, typer.Option(min=0, help="Most draft tokens a step; 0 is plain decoding.")
    ],
    request: Request = None,
) -> None:
    """What the same text would have taken with other numbers of draft tokens.

    Nothing is run: steps are put together from what was drafted and accepted, times from a
    straight line through those of the trace.
    """
    from foredraft.trace.replay import StepCost
    from foredraft.trace.replay import replay as replayed

    trace = _read(file, request)
    cost = StepCost.of(trace.steps)
    recorded = max((row.budget for s in trace.steps for row in s.rows), default=0)
    console = Console(highlight=False)
    table = Table("draft tokens", box=None, padding=(0, 2, 0, 0))
    for title in ("steps", "drafted", "accepted", "committed per step", "tokens/s"):
        table.add_column(title, justify="right")
    sizes = {n for n in _FEW if n < recorded} | {recorded, num_draft_tokens}
    for size in sorted(sizes):
        outcome = replayed(trace.steps, size, cost)
        least = "≥ " if outcome.is_bound else ""
        note = " (as recorded)" if size == recorded else ""
        table.add_row(
            f"{size}{note}",
            *(str(outcome.steps), str(outcome.drafted), str(outcome.accepted)),
            f"{least}{outcome.committed_per_step:.2f}",
            f"{least}{outcome.tokens_per_s:.1f}",
            style="bold" if size == num_draft_tokens else "",
        )
    console.print(table)
    console.print(
        f"a step: {cost.base_ms:.2f} ms and {cost.node_ms:.2f} ms a node, a line through the "
        "recorded steps",
        style="dim",
    )
    if cost.is_flat:
        console.print("all recorded drafts were of one size: what a node costs is not known")
    if num_draft_tokens > recorded:
        console.print("longer drafts than recorded: at least this much, if a node costs the same")


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
