"""How long a prompt takes until its first token: ours in each format of weights, and peers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from benchmarks.contenders import Contender
from benchmarks.course import Rounds
from benchmarks.plain import PLAINLY, Against, load_plain
from benchmarks.timing import Figure, take_turns
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.cli.display import progress_bar
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions


@dataclass
class ReadingFigure(Figure[float]):
    """Seconds until the first token of prompts of one length."""

    name: str
    length: int

    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.samples)

    def as_dict(self) -> dict[str, Any]:
        point = {"name": self.name, "tokens": self.length}
        if self.failure is not None:
            return point | {"failure": self.failure}
        return point | {
            "median_ms": self.median_ms(),
            "min_ms": 1e3 * min(self.samples),
        }


def time_reading(
    contenders: Sequence[Contender],
    lengths: Sequence[int],
    vocab: int,
    rounds: int,
    seed: int,
    advance: Callable[[], None],
) -> list[ReadingFigure]:
    """Each contender on the same prompts, one of each length a round.

    Prompts are random token ids, so that nothing of one is in a cache when the next comes.
    """
    numbers = random.Random(seed)
    figures = [ReadingFigure(one.name, length) for one in contenders for length in lengths]
    by_name = {one.name: one for one in contenders}
    params = SamplingParams(max_tokens=1)

    def new_prompts() -> dict[int, list[int]]:
        return {n: [numbers.randrange(vocab) for _ in range(n)] for n in lengths}

    prompts = new_prompts()

    def read(figure: ReadingFigure) -> float:
        return by_name[figure.name].run(prompts[figure.length], params).first_s

    def end_round() -> None:
        prompts.update(new_prompts())
        advance()

    take_turns(figures, rounds, read, end_round)
    return figures


@o.with_options
def prompts(
    load: Annotated[LoadOptions, PLAINLY],
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, with commas.")] = "512,2000",
    formats: Annotated[
        str | None, typer.Option(help="Several of --weights, with commas: each is loaded.")
    ] = None,
    against: Against = None,
    rounds: Rounds = 5,
    seed: Annotated[int, typer.Option(help="Of the prompts' random tokens.")] = 0,
    output: o.Output = None,
) -> None:
    """Time prompts until their first token, each format of weights beside peers, in turns."""
    check_outputs(output)
    counts = o.numbers("--lengths", lengths, int)
    if min(counts) < 2:
        raise ConfigError(f"--lengths {lengths!r} holds {min(counts)}; a prompt has 2 or more")
    llm, contenders = load_plain(load, against, max(counts) + 1, formats=o.names(formats))
    with progress_bar(rounds + 1) as advance:
        figures = time_reading(
            contenders, counts, llm.target.vocab_size, rounds, seed, lambda: advance("reading")
        )
    assert llm.plan is not None
    columns = {"prompt": "{name}", "tokens": "{tokens:d}", "first token ms": "{median_ms:.0f}"}
    rows = [figure.as_dict() for figure in figures]
    Report([Table("figures", rows, columns)], {"model": llm.plan.name}, seed=seed).give(output)
