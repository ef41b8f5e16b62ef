"""`foredraft bench busy`: plain decoding on a machine that others use as well."""

from __future__ import annotations

from typing import Annotated

import typer

from foredraft.cli import lists
from foredraft.cli import options as o
from foredraft.cli.bench.plain import Against, load_plain, print_by_column
from foredraft.cli.progress import progress_bar
from foredraft.core.errors import ConfigError


@o.with_option_objects
def busy(
    running: o.ModelOptions,
    neighbours: Annotated[
        str, typer.Option(help="Busy processes beside us, with commas.")
    ] = "0,1,2",
    tokens: Annotated[int, typer.Option(min=16, help="Decoded in one turn.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each figure.")] = 4,
    against: Against = None,
    json_file: o.JsonFile = None,
) -> None:
    """Plain decoding beside busy processes: threads that follow, each fixed number, peers."""
    from foredraft.bench.busy import PROMPT_TOKENS, time_beside
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.kernels.threads import available_cpus, steps_up_to

    check_outputs(json_file)
    counts = _counts(neighbours)
    threads = [None, *steps_up_to(available_cpus())]
    llm, contenders = load_plain(running, against, PROMPT_TOKENS + tokens, threads=threads)
    with progress_bar((rounds + 1) * len(counts)) as advance:
        figures = time_beside(contenders, counts, tokens, rounds, lambda: advance("decoding"))
    columns = {str(n): [f for f in figures if f.neighbours == n] for n in counts}
    print_by_column("tokens/s beside busy processes", columns, lambda f: f"{f.tokens_per_s():.1f}")
    if json_file:
        assert llm.plan is not None
        report = {"model": llm.plan.name, "weights": llm.plan.weights}
        write_json(json_file, report | {"figures": [f.as_dict() for f in figures]}, 0)


def _counts(text: str) -> list[int]:
    counts = lists.whole_numbers("--neighbours", text)
    if not 0 <= min(counts) <= max(counts) <= 64:
        raise ConfigError(f"--neighbours {text!r}: from 0 to 64 busy processes")
    return counts
