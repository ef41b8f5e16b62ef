"""Decoding beside busy neighbours, which take turns on the cores with us."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from benchmarks.contenders import Contender
from benchmarks.course import Rounds
from benchmarks.forwards import text
from benchmarks.plain import PLAINLY, Against, load_plain
from benchmarks.timing import Figure, take_turns
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.cli.display import progress_bar
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.kernels.threads import steps_up_to
from foredraft.options import LoadOptions
from foredraft.system.cgroups import available_cpus

PROMPT_TOKENS = 64
_NEIGHBOUR = "while True: pass"


@dataclass
class BusyFigure(Figure[float]):
    """Tokens a second of one contender beside so many busy processes."""

    name: str
    neighbours: int

    def tokens_per_s(self) -> float:
        return statistics.median(self.samples)

    def as_dict(self) -> dict[str, Any]:
        point = {"name": self.name, "neighbours": self.neighbours}
        if self.failure is not None:
            return point | {"failure": self.failure}
        return point | {
            "tokens_per_s": self.tokens_per_s(),
            "most": max(self.samples),
        }


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that only compute, to load the CPUs."""
    with contextlib.ExitStack() as running:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR])
            running.callback(process.wait)
            running.callback(process.kill)
        yield


def time_beside(
    contenders: Sequence[Contender],
    neighbours: Sequence[int],
    num_tokens: int,
    rounds: int,
    advance: Callable[[], None],
) -> list[BusyFigure]:
    """Plain decoding of every contender in turns, beside each number of neighbours."""
    figures: list[BusyFigure] = []
    params = SamplingParams.of(max_tokens=num_tokens, ignore_eos=True)
    by_name = {one.name: one for one in contenders}

    def decode(figure: BusyFigure) -> float:
        run = by_name[figure.name].run(text(PROMPT_TOKENS), params)
        return run.num_decoded / run.decode_s

    for count in neighbours:
        own = [BusyFigure(one.name, count) for one in contenders]
        with busy_processes(count):  # the first turn also finds out how many threads pay
            take_turns(own, rounds, decode, advance)
        figures += own
    return figures


@o.with_options
def busy(
    load: Annotated[LoadOptions, PLAINLY],
    neighbours: Annotated[
        str, typer.Option(help="Busy processes beside us, with commas.")
    ] = "0,1,2",
    tokens: Annotated[int, typer.Option(min=16, help="Decoded in one turn.")] = 96,
    rounds: Rounds = 4,
    against: Against = None,
    output: o.Output = None,
) -> None:
    """Plain decoding beside busy processes: threads that follow, each fixed number, peers."""
    check_outputs(output)
    counts = o.numbers("--neighbours", neighbours, int)
    if not 0 <= min(counts) <= max(counts) <= 64:
        raise ConfigError(f"--neighbours {neighbours!r}: from 0 to 64 busy processes")
    threads = [None, *steps_up_to(available_cpus())]
    llm, contenders = load_plain(load, against, PROMPT_TOKENS + tokens, threads=threads)
    with progress_bar((rounds + 1) * len(counts)) as advance:
        figures = time_beside(contenders, counts, tokens, rounds, lambda: advance("decoding"))
    assert llm.plan is not None
    columns = {"beside": "{neighbours:d}", "who": "{name}", "tokens/s": "{tokens_per_s:.1f}"}
    facts = {"model": llm.plan.name, "weights": llm.plan.weights}
    Report([Table("figures", [f.as_dict() for f in figures], columns)], facts).give(output)
