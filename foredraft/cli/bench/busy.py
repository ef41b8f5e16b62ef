"""`foredraft bench busy`: plain decoding on a machine that others use as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import lists
from foredraft.cli import options as o
from foredraft.cli.bench.llama import LLAMA_PEERS, llama_contenders, llama_names
from foredraft.cli.progress import progress_bar
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.busy import BusyFigure


@o.with_option_objects
def busy(
    running: o.ModelOptions,
    neighbours: Annotated[
        str, typer.Option(help="Busy processes beside us, with commas.")
    ] = "0,1,2",
    tokens: Annotated[int, typer.Option(min=16, help="Decoded in one turn.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each figure.")] = 4,
    against: Annotated[
        str | None, typer.Option(help=f"Peers with commas: {', '.join(LLAMA_PEERS)}.")
    ] = None,
    json_file: o.JsonFile = None,
) -> None:
    """Plain decoding beside busy processes: threads that follow, each fixed number, peers."""
    from foredraft.bench.busy import time_beside
    from foredraft.bench.contenders import OurContender
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.bench.variants import load_variants
    from foredraft.kernels.threads import available_cpus, steps_up_to

    check_outputs(json_file)
    counts = _counts(neighbours)
    peers = llama_names(against)
    asked = o.load_options(running, drafter="none", max_batch_size=1)
    threads = [None, *steps_up_to(available_cpus())]
    variants = load_variants(asked, o.load_llm, threads=threads)
    contenders = [OurContender(one.llm, asked, one.name) for one in variants]
    with progress_bar((rounds + 1) * len(counts)) as advance:
        figures = time_beside(
            [*contenders, *llama_contenders(variants[0].llm, peers, tokens + 128)],
            counts, tokens, rounds, lambda: advance("decoding"),
        )  # fmt: skip
    _print(Console(highlight=False), figures, counts)
    if json_file:
        plan = variants[0].llm.plan
        assert plan is not None
        report = {"model": plan.name, "weights": plan.weights}
        write_json(json_file, report | {"figures": [f.as_dict() for f in figures]}, 0)


def _counts(text: str) -> list[int]:
    counts = lists.whole_numbers("--neighbours", text)
    if not 0 <= min(counts) <= max(counts) <= 64:
        raise ConfigError(f"--neighbours {text!r}: from 0 to 64 busy processes")
    return counts


def _print(console: Console, figures: Sequence[BusyFigure], counts: Sequence[int]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("tokens/s beside busy processes")
    for count in counts:
        table.add_column(str(count), justify="right")
    for name in dict.fromkeys(figure.name for figure in figures):
        own = {f.neighbours: f.tokens_per_s() for f in figures if f.name == name}
        table.add_row(name, *(f"{own[count]:.1f}" for count in counts))
    console.print(table)
