"""`foredraft bench step`: what scoring n tokens costs, beside the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import lists
from foredraft.cli import options as o
from foredraft.cli.bench.peers import LLAMA_PEERS, open_stepper
from foredraft.cli.progress import progress_bar
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.floor import Machine
    from foredraft.bench.step import Size, StepFigure, Stepper
    from foredraft.bench.variants import Variant
    from foredraft.llm import LLM
    from foredraft.options import LoadOptions

PEERS = ("transformers", "llama.cpp", *LLAMA_PEERS)


@dataclass(frozen=True)
class Forwards:
    """Which forwards are timed, of whom, and how often."""

    tokens: Annotated[str, typer.Option(help="Tokens of a row in one forward, with commas.")] = (
        "1,2,4,8,16,32"
    )
    rows: Annotated[str, typer.Option(help="Rows of the batch, with commas.")] = "1"
    context: Annotated[str, typer.Option(help="Tokens already in the cache, with commas.")] = "256"
    isa: o.InstructionSets = None
    formats: o.Formats = None
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 15
    against: Annotated[str | None, typer.Option(help=f"Peers with commas: {', '.join(PEERS)}.")] = (
        None
    )

    @property
    def contexts(self) -> list[int]:
        return lists.counts("--context", self.context)

    @property
    def sizes(self) -> list[Size]:
        from foredraft.bench.step import Size

        counts = lists.counts("--tokens", self.tokens)
        return [Size(r, n) for r in lists.counts("--rows", self.rows) for n in counts]

    @property
    def peers(self) -> list[str]:
        """By name; "llama.cpp" alone means each of its formats."""
        names: list[str] = []
        for name in lists.known_names("peer", self.against, PEERS):
            names += LLAMA_PEERS if name == "llama.cpp" else [name]
        return names


@o.with_option_objects
def step(
    running: o.ModelOptions,
    forwards: Forwards,
    drafter: o.Drafter = "auto",
    draft_model: o.DraftModel = None,
    random_weights: o.RandomWeights = None,
    json_file: o.JsonFile = None,
    plot: Annotated[str | None, typer.Option(help="Draw the times into this PNG.")] = None,
) -> None:
    """Time a forward of n tokens: target, drafter and peers, in rotating order.

    Speculation pays exactly as much as n tokens at once are cheaper than one token n times. The
    floor is all weights read once at the bandwidth measured, or all products at the rate measured.
    """
    from foredraft.bench.floor import measure_machine
    from foredraft.bench.plots import plot_steps
    from foredraft.bench.report import check_outputs

    check_outputs(json_file, plot)
    sizes = forwards.sizes
    most = max(size.rows for size in sizes)
    asked = o.load_options(running, drafter=drafter, draft_model=draft_model, max_batch_size=most)
    variants = _variants(asked, forwards, random_weights)
    llm = variants[0].llm
    import torch

    assert llm.plan is not None
    machine = measure_machine(llm.plan.device, getattr(torch, llm.plan.dtype))
    figures = _timed(variants, forwards)
    floors = {variant.name: _floors(variant.llm, machine, sizes) for variant in variants}
    _print_figures(Console(highlight=False), llm, machine, figures, floors)
    if json_file:
        _write(json_file, llm, forwards, machine, figures, floors[variants[0].name])
    if plot:
        plot_steps(figures, floors[variants[0].name], plot)


def _variants(asked: LoadOptions, forwards: Forwards, random_weights: str | None) -> list[Variant]:
    """Ours, loaded.

    Raises:
        ConfigError: what is asked for does not go together; nothing has been loaded.
    """
    from foredraft.bench.variants import load_variants

    _, peers = forwards.contexts, forwards.peers  # each says what is wrong with it
    if random_weights and peers:
        raise ConfigError(
            f"--against {','.join(peers)} needs a checkpoint that peers can load; leave it out "
            "with --random-weights"
        )
    formats = lists.names(forwards.formats)
    return load_variants(
        asked, lambda options: o.load_llm(options, random_weights), forwards.isa, formats
    )


def _timed(variants: Sequence[Variant], forwards: Forwards) -> list[StepFigure]:
    from foredraft.bench.step import time_steps

    sizes, rounds = forwards.sizes, forwards.rounds
    steppers = _steppers(variants, forwards.contexts, sizes, forwards.peers)
    with progress_bar(rounds + 1) as advance:
        return time_steps(steppers, sizes, rounds, lambda: advance("timing"))


def _write(
    path: str,
    llm: LLM,
    forwards: Forwards,
    machine: Machine,
    figures: Sequence[StepFigure],
    floors: Mapping[int, float],
) -> None:
    from foredraft.bench.report import write_json

    assert llm.plan is not None
    contexts = forwards.contexts
    report = {
        "model": llm.plan.name,
        "weights": llm.plan.weights,
        "context": contexts[0] if len(contexts) == 1 else forwards.context,
        "machine_rates": vars(machine),
        "floor_ms": {str(n): ms for n, ms in floors.items()},
        "figures": [figure.as_dict() for figure in figures],
    }
    write_json(path, report, 0)


def _steppers(
    variants: Sequence[Variant],
    contexts: Sequence[int],
    sizes: Sequence[Size],
    peers: Sequence[str],
) -> list[Stepper]:
    from foredraft.bench.step import DrafterStepper, TargetStepper
    from foredraft.drafters import build_drafter

    max_rows = max(size.rows for size in sizes)
    found: list[Stepper] = []
    for context in contexts:
        behind = f" at {context}" if len(contexts) > 1 else ""
        for one in variants:
            phases = getattr(getattr(one.llm.target, "decoder", None), "phase_seconds", None)
            name = one.name + behind
            found.append(TargetStepper(name, one.llm.target, context, max_rows, phases))
    llm, context = variants[0].llm, contexts[0]
    if llm.drafter_name != "none" and len(variants) == 1:
        drafter = build_drafter(llm.drafter_name, llm.drafter_context)
        found.append(DrafterStepper(llm.drafter_name, drafter, llm.target, context))
    return [*found, *(open_stepper(llm, peer, context) for peer in peers)]


def _floors(llm: LLM, machine: Machine, sizes: Sequence[Size]) -> dict[int, float]:
    """By tokens of a forward: all weights read once, or all products."""
    plan = llm.plan
    assert plan is not None
    # Integer products run at a rate of their own, which nothing here measures.
    num_parameters = 0 if plan.weight_bits else plan.num_parameters
    counts = sorted({size.rows * size.tokens for size in sizes})
    return {n: machine.floor_ms(plan.read_bytes, num_parameters, n) for n in counts}


def _print_figures(
    console: Console,
    llm: LLM,
    machine: Machine,
    figures: Sequence[StepFigure],
    floors: Mapping[str, Mapping[int, float]],
) -> None:
    plan = llm.plan
    assert plan is not None
    console.print(
        f"{plan.name}, {plan.number_format}, {plan.decoder} kernels; "
        f"reads {machine.bytes_per_s / 1e9:.1f} GB/s, multiplies "
        f"{machine.flops_per_s / 1e9:.0f} GFLOP/s; median ms of a forward",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("what")
    parts = list(dict.fromkeys(part for figure in figures for part in figure.parts))
    for title in ("rows", "tokens", "ms", "vs 1", "floor", *parts):
        table.add_column(title, justify="right")
    well = [figure for figure in figures if figure.failure is None]
    ones = {(f.name, f.size.rows): f.median_ms() for f in well if f.size.tokens == 1}
    for figure in well:
        one = ones.get((figure.name, figure.size.rows))
        floor = floors.get(figure.name.partition(" at ")[0], {})
        table.add_row(
            figure.name,
            str(figure.size.rows),
            str(figure.size.tokens),
            f"{figure.median_ms():.2f}",
            f"{figure.median_ms() / one:.2f}x" if one else "",
            f"{floor[figure.size.rows * figure.size.tokens]:.2f}" if floor else "",
            *(f"{figure.median_ms(part):.2f}" if part in figure.parts else "" for part in parts),
        )
    console.print(table)
    for name, why in dict.fromkeys((f.name, f.failure) for f in figures if f.failure):
        sizes = [str(f.size.tokens) for f in figures if (f.name, f.failure) == (name, why)]
        console.print(f"{name}: {why} at {', '.join(sizes)} tokens", markup=False)
