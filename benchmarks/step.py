"""``step``: what scoring n tokens costs in every kernel and format, beside other engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from benchmarks.course import Forwards, Rounds, loading, timed
from benchmarks.forwards import own_steppers, step_report
from benchmarks.peers import LLAMA_PEERS, open_stepper, peer_names
from benchmarks.plots import check_plot, plot_steps
from benchmarks.random_files import random_file
from benchmarks.random_model import load_llm
from benchmarks.variants import load_variants
from foredraft.bench.report import check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions

PEERS = ("transformers", "llama.cpp", *LLAMA_PEERS)


@dataclass(frozen=True)
class Ways:
    """In which ways a forward is timed.

    Attributes:
        isa: instruction sets with commas, or all that this machine runs.
        formats: several of --weights, with commas: each is loaded and timed.
        caches: several of --cache-dtype likewise.
        against: other engines with commas.
        random_weights: instead of a model this shape with random weights, for timing only.
        stored: with random weights, a format of GGUF files: both engines read one such file.
    """

    isa: str | None = None
    formats: str | None = None
    caches: str | None = None
    against: str | None = None
    random_weights: str | None = None
    stored: str | None = None

    @property
    def peers(self) -> list[str]:
        """By name; "llama.cpp" alone means each of its formats."""
        names: list[str] = []
        for name in peer_names(self.against, PEERS):
            names += LLAMA_PEERS if name == "llama.cpp" else [name]
        return names


@o.with_options
def step(
    load: Annotated[LoadOptions, loading()],
    forwards: Forwards,
    ways: Ways,
    rounds: Rounds = 15,
    output: o.Output = None,
    plot: Annotated[str | None, typer.Option(help="Draw the times into this PNG.")] = None,
) -> None:
    """Time a forward of n tokens: target, drafter and other engines, in rotating order.

    Speculation pays exactly as much as n tokens at once are cheaper than one token n times. The
    floor is the time to read all weights once at the measured bandwidth, or to make all products at
    the measured rate.
    """
    check_outputs(output)
    check_plot(plot)
    if ways.stored is None:
        _step(load, forwards, ways, rounds, output, plot)
        return
    if ways.random_weights is None:
        raise ConfigError("--stored is of --random-weights; name a shape, such as llama-1b")
    as_it_is = replace(load, weights="auto")
    with random_file(as_it_is, ways.random_weights, ways.stored) as stored:
        _step(stored, forwards, replace(ways, random_weights=None), rounds, output, plot)


def _step(
    load: LoadOptions,
    forwards: Forwards,
    ways: Ways,
    rounds: int,
    output: str | None,
    plot: str | None,
) -> None:
    sizes, contexts, peers = forwards.sizes, forwards.contexts, ways.peers
    other_model = load.model if load.model.endswith(".gguf") else ways.random_weights
    if other_model and "transformers" in peers:
        raise ConfigError(
            "--against transformers needs a checkpoint; beside a GGUF file or --random-weights "
            "llama.cpp alone runs, on that file or on one of the same shape"
        )
    load = replace(load, max_batch_size=max(size.rows for size in sizes))
    variants = load_variants(
        *(load, lambda each: load_llm(each, ways.random_weights), ways.isa, o.names(ways.formats)),
        caches=o.names(ways.caches),
    )
    llms = {variant.name: variant.llm for variant in variants}
    steppers = own_steppers(llms, contexts, sizes)
    most = max(size.tokens for size in sizes)
    steppers += [
        open_stepper(variants[0].llm, name, contexts[0], most, other_model) for name in peers
    ]
    figures = timed(steppers, sizes, rounds)
    report = step_report(llms, figures, contexts, sizes)
    report.give(output)
    if plot:
        floor = report.facts["floor_ms"]
        plot_steps(figures, {int(n): ms for n, ms in floor.items()}, plot)
