"""`foredraft bench serve-sim`: many requests at once, with speculation and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import lists
from foredraft.cli import options as o
from foredraft.cli.progress import progress_bar
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.serving import Contender, Load, Served, ServingFigure
    from foredraft.core.record import StepRecord
    from foredraft.llm import LLM
    from foredraft.options import LoadOptions

_BASELINE, _WRONG = "none", "wrong"
_MOST_DRAFTED = 64
PEERS = ("llama-cpp", "llama-cpp-bf16", "llama-cpp-q8_0", "llama-cpp-q4_1")


@dataclass(frozen=True)
class Demand:
    """What all contenders are asked for."""

    concurrency: Annotated[str, typer.Option(help="Requests in flight, with commas.")] = (
        "1,2,4,8,16"
    )
    prompts: o.Prompts = None
    temperature: Annotated[str, typer.Option(help="One or more, with commas.")] = "0"
    tokens: Annotated[int, typer.Option(min=1, help="Of each reply; its end is ignored.")] = 96
    num: Annotated[int, typer.Option(min=1, help="Requests, at least as many as in flight.")] = 16
    rounds: Annotated[int, typer.Option(min=1, help="How often to serve each load.")] = 1
    seed: Annotated[int, typer.Option(help="Used at temperatures above 0.")] = 0

    @property
    def in_flight(self) -> list[int]:
        return lists.counts("--concurrency", self.concurrency)

    @property
    def temperatures(self) -> list[float]:
        return lists.numbers("--temperature", self.temperature)

    def loads(self, ids: Sequence[Sequence[int]]) -> list[Load]:
        """One for each number in flight at each temperature."""
        from foredraft.bench.serving import Load
        from foredraft.core.params import SamplingParams

        shared = {"max_tokens": self.tokens, "seed": self.seed, "ignore_eos": True}
        return [
            Load(ids[: max(self.num, count)], SamplingParams.of(temperature=t, **shared), count)
            for t in self.temperatures
            for count in self.in_flight
        ]


@o.with_option_objects
def serve_sim(
    running: o.ModelOptions,
    demand: Demand,
    drafter: Annotated[
        str,
        typer.Option(
            help="With commas: auto, a drafter, NAME:K for a fixed budget of K nodes, or wrong "
            "(one that always is). none is the baseline and always there."
        ),
    ] = "auto,none",
    draft_model: o.DraftModel = None,
    peer: Annotated[
        str | None, typer.Option(help=f"Peers with commas: {', '.join(PEERS)} (greedy only).")
    ] = None,
    random_weights: o.RandomWeights = None,
    json_file: o.JsonFile = None,
) -> None:
    """Throughput and latency of many requests at once, in turns on one loaded model.

    Each contender keeps as many requests in flight as it is asked to. All take turns of a few steps
    and only a contender's own time counts for it. Beside them, what forwards of one row and of all
    rows take, in the same run: what decoding without speculation can reach at best. Exit status 1
    if a text of ours differs from the plain one.

    Examples:

        foredraft bench serve-sim --concurrency 1,16 --drafter auto,wrong

        foredraft bench serve-sim --concurrency 8,16 --peer llama-cpp --temperature 0
    """
    from foredraft.bench.report import check_outputs

    check_outputs(json_file)
    peers, most = _peer_names(peer, demand.temperatures), max(demand.in_flight)
    if random_weights and (peers or demand.prompts):
        raise ConfigError("random weights have no tokenizer: leave out --peer and --prompts")
    asked = o.load_options(
        running,
        drafter="auto",
        draft_model=draft_model,
        max_batch_size=most,
        prefix_caching=False,  # all are to read their prompts
    )
    llm = o.load_llm(asked, random_weights)
    ours = _contenders(llm, asked, lists.names(drafter))
    ids = prompt_ids(llm, demand.prompts, max(demand.num, most), demand.tokens)
    theirs = _peers(llm, peers, most, max(map(len, ids)) + demand.tokens)
    figures, forwards = _serve_all(llm, [*ours, *theirs], demand.loads(ids), demand.rounds)
    _print(Console(highlight=False), figures, forwards)
    if json_file:
        _write(json_file, llm, demand, figures, forwards)
    names = {contender.name for contender in ours}
    if any(each.num_different for each in figures if each.contender in names):
        raise typer.Exit(1)


def _serve_all(
    llm: LLM, contenders: Sequence[Contender], loads: Sequence[Load], rounds: int
) -> tuple[list[ServingFigure], list[dict[str, Any]]]:
    """Figures of all contenders under each load, and what each load's forwards take."""
    figures: list[ServingFigure] = []
    forwards: list[dict[str, Any]] = []
    with progress_bar(sum(len(load.prompts) for load in loads) * rounds * len(contenders)) as bar:
        for load in loads:
            found, forward = _serve(llm, contenders, load, rounds, bar)
            figures += found
            forwards.append(forward)
    return figures, forwards


def _serve(
    llm: LLM,
    contenders: Sequence[Contender],
    load: Load,
    rounds: int,
    advance: Callable[[str], None],
) -> tuple[list[ServingFigure], dict[str, Any]]:
    """All contenders under one load, and what its forwards take."""
    from foredraft.bench.forwards import ForwardTimes, grow_cache
    from foredraft.bench.serving import figure, serve

    results: dict[str, list[Served]] = {contender.name: [] for contender in contenders}
    context = sum(map(len, load.prompts)) // len(load.prompts) + load.params.max_tokens // 2
    most = max(map(len, load.prompts)) + load.params.max_tokens + _MOST_DRAFTED
    grow_cache(llm.target.cache, (len(contenders) + 1) * load.concurrency, most)
    with ForwardTimes(llm.target, load.concurrency, context) as forwards:
        for number in range(rounds):
            turn = number % len(contenders)
            order = [*contenders[turn:], *contenders[:turn]]
            serve(order, load, advance, forwards.turn)
            for contender in contenders:
                results[contender.name].append(contender.served)
        times = forwards.as_dict()
    found = [figure(name, load, served, results[_BASELINE]) for name, served in results.items()]
    plain = next(each for each in found if each.contender == _BASELINE)
    best = 1e3 * load.concurrency / times["all_rows_ms"]
    reached = times["all_rows_ms"] / plain.step_ms
    share = plain.python_ms / plain.step_ms
    return found, {
        "concurrency": load.concurrency,
        "temperature": load.params.temperature,
        **times,
        "best_tokens_per_s": best,
        "plain_reaches": reached,
        "plain_python_share": share,
    }


def _peer_names(text: str | None, temperatures: Sequence[float]) -> list[str]:
    names: list[str] = []
    asked = text and text.replace("llama.cpp", "llama-cpp")  # as other benches spell it
    for name in lists.known_names("peer", asked, PEERS):
        names += PEERS[1:] if name == PEERS[0] else [name]
    if names and any(temperatures):
        raise ConfigError("peers draw other random numbers: compare with them at temperature 0")
    return names


def _contenders(llm: LLM, asked: LoadOptions, names: Sequence[str]) -> list[Contender]:
    from foredraft.bench.serving import OurContender

    wanted = [*names, *([] if _BASELINE in names else [_BASELINE])]
    return [OurContender(name, _factory(llm, asked, name)) for name in wanted]


def _factory(
    llm: LLM, asked: LoadOptions, name: str
) -> Callable[[int, Callable[[StepRecord], None]], LLM]:
    """Makes the LLM of a contender by its name, for a number of requests in flight."""
    from foredraft.bench.wrong import WrongDrafter
    from foredraft.drafters import drafter_spec

    kind, _, budget = name.partition(":")
    if budget and not budget.isdecimal():
        raise ConfigError(f"--drafter {name!r}: what follows the colon must be a number of nodes")
    if kind == _WRONG:
        drafter, own = "ngram", WrongDrafter(llm.target.vocab_size)
    else:
        drafter, own = kind, None
        if kind != "auto":
            drafter_spec(kind)  # says which name is nearest when it is unknown
    options = replace(asked, drafter=drafter, num_draft_tokens=int(budget) if budget else None)
    if kind == _WRONG or (kind != "auto" and drafter_spec(kind).draft_model == "none"):
        options = replace(options, draft_model=None)

    def make(rows: int, trace: Callable[[StepRecord], None]) -> LLM:
        return llm.with_drafter(replace(options, max_batch_size=rows), trace=trace, drafter=own)

    return make


def _peers(llm: LLM, names: Sequence[str], most: int, tokens: int) -> list[Contender]:
    if not names:
        return []
    import torch

    from foredraft.bench.llama_batch import LlamaBatchContender

    assert llm.plan is not None
    found: list[Contender] = []
    for name in names:
        kind = name.removeprefix("llama-cpp-")
        threads = torch.get_num_threads()
        found.append(LlamaBatchContender(llm.plan.directory, kind, most, threads, tokens))
    return found


def prompt_ids(llm: LLM, path: str | None, num: int, tokens: int) -> list[list[int]]:
    """As many prompts as are asked for, over and over if there are fewer that fit the context.

    Raises:
        ConfigError: none fits.
    """
    from itertools import cycle, islice

    from foredraft.bench.prompts import load_prompts, random_prompts

    if llm.tokenizer is None:
        return [ids for _, ids in random_prompts(num)]
    encode = llm.tokenizer.encode_chat
    found = load_prompts(path, num if path else None)
    ids = [encode([{"role": "user", "content": prompt.text}]) for prompt in found]
    room = llm.target.max_context - tokens
    fitting = [each for each in ids if len(each) <= room]
    if not fitting:
        raise ConfigError(f"no prompt leaves room for {tokens} tokens in the context")
    return [*islice(cycle(fitting), num)]


def _write(
    path: str,
    llm: LLM,
    demand: Demand,
    figures: Sequence[ServingFigure],
    forwards: Sequence[dict[str, Any]],
) -> None:
    from foredraft.bench.report import write_json

    report = {
        "model": {"name": llm.plan.name, "weights": llm.plan.weights} if llm.plan else {},
        "tokens": demand.tokens,
        "figures": [each.as_dict() for each in figures],
        "forwards": forwards,
    }
    write_json(path, report, demand.seed)


_COLUMNS = {
    "rows": ("concurrency", "{}"),
    "T": ("temperature", "{:g}"),
    "drafter": ("contender", "{}"),
    "tok/s": ("tokens_per_s", "{:.1f}"),
    "vs none": ("speedup", "{:.3f}"),
    "median": ("median_s", "{:.2f}"),
    "p95 s": ("p95_s", "{:.2f}"),
    "comm.": ("committed_per_step", "{:.2f}"),
    "draft.": ("drafted_per_step", "{:.2f}"),
    "step ms": ("step_ms", "{:.2f}"),
    "draft": ("draft_ms", "{:.2f}"),
    "kernel": ("kernel_ms", "{:.2f}"),
    "python": ("python_ms", "{:.2f}"),
    "diff.": ("num_different", "{}"),
}
"""Title: field and format."""


def _print(
    console: Console, figures: Sequence[ServingFigure], forwards: Sequence[dict[str, Any]]
) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in _COLUMNS:
        table.add_column(title, justify="left" if title == "drafter" else "right", no_wrap=True)
    for each in figures:
        values = each.as_dict()
        table.add_row(*(form.format(values[name]) for name, form in _COLUMNS.values()))
    console.print(table)
    for f in forwards:
        console.print(
            f"{f['concurrency']} at once, temperature {f['temperature']:g}: a forward of one row "
            f"{f['one_row_ms']:.2f} ms, of all {f['all_rows_ms']:.2f} ms ({f['gain']:.2f} times "
            f"one row's throughput); plain decoding reaches {f['plain_reaches']:.1%} of it, "
            f"{f['plain_python_share']:.1%} of a step is outside the kernel",
            soft_wrap=True,
        )
