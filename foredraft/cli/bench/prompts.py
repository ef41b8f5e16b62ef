"""`foredraft bench prompts`: how long prompts take until their first token."""

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
    from foredraft.bench.reading import ReadingFigure


@o.with_option_objects
def prompts(
    running: o.ModelOptions,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, with commas.")] = "512,2000",
    formats: o.Formats = None,
    against: Annotated[
        str | None, typer.Option(help=f"Peers with commas: {', '.join(LLAMA_PEERS)}.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the prompts' random tokens.")] = 0,
    json_file: o.JsonFile = None,
) -> None:
    """Time prompts until their first token, each format of weights beside peers, in turns."""
    from foredraft.bench.contenders import OurContender
    from foredraft.bench.reading import time_reading
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.bench.variants import load_variants

    check_outputs(json_file)
    counts = _lengths(lengths)
    peers = llama_names(against)
    asked = o.load_options(running, drafter="none", max_batch_size=1)
    variants = load_variants(asked, o.load_llm, formats=lists.names(formats))
    plan = variants[0].llm.plan
    assert plan is not None
    if max(counts) >= plan.max_context:
        raise ConfigError(f"--lengths holds {max(counts)}; the context is {plan.max_context}")
    contenders = [OurContender(one.llm, asked, one.name) for one in variants]
    with progress_bar(rounds + 1) as advance:
        figures = time_reading(
            [*contenders, *llama_contenders(variants[0].llm, peers, max(counts) + 8)],
            counts, variants[0].llm.target.vocab_size, rounds, seed, lambda: advance("reading"),
        )  # fmt: skip
    _print(Console(highlight=False), figures, counts)
    if json_file:
        report = {"model": plan.name, "figures": [figure.as_dict() for figure in figures]}
        write_json(json_file, report, seed)


def _lengths(text: str) -> list[int]:
    counts = lists.whole_numbers("--lengths", text)
    if min(counts) < 2:
        raise ConfigError(f"--lengths {text!r} holds {min(counts)}; prompts have 2 tokens or more")
    return counts


def _print(console: Console, figures: Sequence[ReadingFigure], lengths: Sequence[int]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("ms until the first token")
    for length in lengths:
        table.add_column(f"{length} tokens", justify="right")
    for name in dict.fromkeys(figure.name for figure in figures):
        own = {figure.length: figure for figure in figures if figure.name == name}
        table.add_row(name, *(f"{own[length].median_ms():.0f}" for length in lengths))
    console.print(table)
