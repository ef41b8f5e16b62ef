"""`foredraft bench prompts`: how long prompts take until their first token."""

from __future__ import annotations

from typing import Annotated

import typer

from foredraft.cli import lists
from foredraft.cli import options as o
from foredraft.cli.bench.plain import Against, load_plain, print_by_column
from foredraft.cli.progress import progress_bar
from foredraft.core.errors import ConfigError


@o.with_option_objects
def prompts(
    running: o.ModelOptions,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, with commas.")] = "512,2000",
    formats: o.Formats = None,
    against: Against = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the prompts' random tokens.")] = 0,
    json_file: o.JsonFile = None,
) -> None:
    """Time prompts until their first token, each format of weights beside peers, in turns."""
    from foredraft.bench.reading import time_reading
    from foredraft.bench.report import check_outputs, write_json

    check_outputs(json_file)
    counts = _lengths(lengths)
    llm, contenders = load_plain(running, against, max(counts) + 1, formats=lists.names(formats))
    with progress_bar(rounds + 1) as advance:
        figures = time_reading(
            contenders, counts, llm.target.vocab_size, rounds, seed, lambda: advance("reading")
        )
    columns = {f"{n} tokens": [f for f in figures if f.length == n] for n in counts}
    print_by_column("ms until the first token", columns, lambda f: f"{f.median_ms():.0f}")
    if json_file:
        assert llm.plan is not None
        report = {"model": llm.plan.name, "figures": [figure.as_dict() for figure in figures]}
        write_json(json_file, report, seed)


def _lengths(text: str) -> list[int]:
    counts = lists.whole_numbers("--lengths", text)
    if min(counts) < 2:
        raise ConfigError(f"--lengths {text!r} holds {min(counts)}; prompts have 2 tokens or more")
    return counts
