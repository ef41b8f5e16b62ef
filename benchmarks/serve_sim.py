"""``serve-sim``: many requests at once, with speculation and without, in turns on one model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Annotated, Any

import torch
import typer

from benchmarks.course import loading
from benchmarks.forwards import Size, TargetStepper
from benchmarks.llama_batch import LlamaBatchServer
from benchmarks.peers import peer_names
from benchmarks.random_model import load_llm
from benchmarks.serving import ServingFigure, figure
from foredraft.bench.load import Load, OurServer, Served, Server, serve
from foredraft.bench.prompts import encoded_prompts
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cache.paged import Cache
from foredraft.cli import options as o
from foredraft.cli.display import progress_bar
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import StepRecord
from foredraft.core.tree import TokenTree
from foredraft.drafters import drafter_spec
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.llm import LLM
from foredraft.models.base import Target
from foredraft.options import LoadOptions

_BASELINE, _WRONG = "none", "wrong"
_MOST_DRAFTED = 64
PEERS = ("llama-cpp", "llama-cpp-bf16", "llama-cpp-q8_0", "llama-cpp-q4_1")


@dataclass(frozen=True)
class Demand:
    """The requests that all contenders serve.

    Attributes:
        concurrency: requests in flight, with commas.
        prompts: JSON lines with category and turns; a few built-in ones otherwise.
        temperature: one or more, with commas.
        tokens: of each reply; its end is ignored.
        num: requests, at least as many as in flight.
        rounds: how often to serve each load.
        seed: used at temperatures above 0.
    """

    concurrency: str = "1,2,4,8,16"
    prompts: str | None = None
    temperature: str = "0"
    tokens: int = 96
    num: int = 16
    rounds: int = 1
    seed: int = 0

    @property
    def in_flight(self) -> list[int]:
        return o.numbers("--concurrency", self.concurrency, int, low=1)

    @property
    def temperatures(self) -> list[float]:
        return o.numbers("--temperature", self.temperature, float)

    def loads(self, ids: Sequence[Sequence[int]]) -> list[Load]:
        """One for each number in flight at each temperature."""
        shared = {"max_tokens": self.tokens, "seed": self.seed, "ignore_eos": True}
        return [
            Load(ids[: max(self.num, count)], SamplingParams.of(temperature=t, **shared), count)
            for t in self.temperatures
            for count in self.in_flight
        ]


@o.with_options
def serve_sim(
    load: Annotated[
        LoadOptions,
        loading(
            drafter="auto",
            drafter_options={},
            prefix_caching=False,  # all contenders have to read their prompts
        ),
    ],
    demand: Demand,
    drafter: Annotated[
        str,
        typer.Option(
            help="With commas: auto, a drafter, NAME:K for a fixed budget of K nodes, or wrong "
            "(one that always is). none is the baseline and always there."
        ),
    ] = "auto,none",
    peer: Annotated[
        str | None, typer.Option(help=f"Peers with commas: {', '.join(PEERS)} (greedy only).")
    ] = None,
    random_weights: Annotated[
        str | None, typer.Option(help="Instead: this shape, random weights, for timing only.")
    ] = None,
    output: o.Output = None,
) -> None:
    """Throughput and latency of many requests at once, in turns on one loaded model.

    Each contender keeps as many requests in flight as it is asked to. All take turns of a few steps
    and only a contender's own time counts for it. Beside them, what forwards of one row and of all
    rows take, in the same run: what decoding without speculation can reach at best. The exit status
    is 1 if a text of ours differs from the plain one.
    """
    check_outputs(output)
    peers, most = _peer_names(peer, demand.temperatures), max(demand.in_flight)
    if random_weights and (peers or demand.prompts):
        raise ConfigError("random weights have no tokenizer: leave out --peer and --prompts")
    load = replace(load, max_batch_size=most)
    llm = load_llm(load, random_weights)
    ours = _contenders(llm, load, o.names(drafter))
    ids = _repeated_prompts(llm, demand.prompts, max(demand.num, most), demand.tokens)
    theirs = _peers(llm, peers, most, max(map(len, ids)) + demand.tokens)
    figures, forwards = _serve_all(llm, [*ours, *theirs], demand.loads(ids), demand.rounds)
    _report(llm, demand, figures, forwards).give(output)
    names = {contender.name for contender in ours}
    if any(each.num_different for each in figures if each.contender in names):
        raise typer.Exit(1)


def _serve_all(
    llm: LLM, contenders: Sequence[Server], loads: Sequence[Load], rounds: int
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
    contenders: Sequence[Server],
    load: Load,
    rounds: int,
    advance: Callable[[str], None],
) -> tuple[list[ServingFigure], dict[str, Any]]:
    """All contenders under one load, and what its forwards take."""

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
    spelled = text and text.replace("llama.cpp", "llama-cpp")  # as other benches spell it
    for name in peer_names(spelled, PEERS):
        names += PEERS[1:] if name == PEERS[0] else [name]
    if names and any(temperatures):
        raise ConfigError("peers draw other random numbers: compare with them at temperature 0")
    return names


def _contenders(llm: LLM, asked: LoadOptions, names: Sequence[str]) -> list[Server]:

    wanted = [*names, *([] if _BASELINE in names else [_BASELINE])]
    return [OurServer(name, _factory(llm, asked, name)) for name in wanted]


def _factory(
    llm: LLM, asked: LoadOptions, name: str
) -> Callable[[int, Callable[[StepRecord], None]], LLM]:
    """Makes the LLM of a contender by its name, for a number of requests in flight."""

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
        return llm.with_drafter(options, trace=trace, drafter=own, is_apart=True)

    return make


def _peers(llm: LLM, names: Sequence[str], most: int, tokens: int) -> list[Server]:
    if not names:
        return []

    assert llm.plan is not None
    found: list[Server] = []
    for name in names:
        kind = name.removeprefix("llama-cpp-")
        threads = torch.get_num_threads()
        found.append(LlamaBatchServer(llm.plan.directory, kind, most, threads, tokens))
    return found


_COLUMNS = {
    "rows": "{concurrency:d}",
    "T": "{temperature:g}",
    "drafter": "{contender}",
    "tok/s": "{tokens_per_s:.1f}",
    "vs none": "{speedup:.3f}",
    "median": "{median_s:.2f}",
    "p95 s": "{p95_s:.2f}",
    "comm.": "{committed_per_step:.2f}",
    "draft.": "{drafted_per_step:.2f}",
    "step ms": "{step_ms:.2f}",
    "draft": "{draft_ms:.2f}",
    "kernel": "{kernel_ms:.2f}",
    "python": "{python_ms:.2f}",
    "diff.": "{num_different:d}",
}


_LINE = (
    "{concurrency} at once, temperature {temperature:g}: a forward of one row {one_row_ms:.2f} ms, "
    "of all {all_rows_ms:.2f} ms ({gain:.2f} times one row's throughput); plain decoding reaches "
    "{plain_reaches:.1%} of it, {plain_python_share:.1%} of a step is outside the kernel"
)


def _report(
    llm: LLM,
    demand: Demand,
    figures: Sequence[ServingFigure],
    forwards: Sequence[dict[str, Any]],
) -> Report:
    model = {"name": llm.plan.name, "weights": llm.plan.weights} if llm.plan else {}
    return Report(
        [
            Table("figures", [each.as_dict() for each in figures], _COLUMNS),
            Table("forwards", forwards),
        ],
        {"model": model, "tokens": demand.tokens},
        [_LINE.format(**each) for each in forwards],
        demand.seed,
    )


class WrongDrafter(BaseDrafter):
    """Drafts as many tokens as it may, hardly one of which the target would ever write.

    Args:
        vocab_size: of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._draft(row) for row in rows]

    def _draft(self, row: DraftRow) -> Proposal:
        first = 7919 * len(row.tokens) + row.tokens[-1]
        tokens = [(first + 104_729 * i) % self._vocab_size for i in range(row.budget)]
        return Proposal.chosen(TokenTree.chain(tokens))


class ForwardTimes:
    """Bare forwards of one token a row, without anything around them.

    Args:
        num_rows: of the large ones.
        context: tokens in the cache of each row.
    """

    def __init__(self, target: Target, num_rows: int, context: int) -> None:
        self._stepper = TargetStepper("target", target, context, num_rows)
        self._sizes = (Size(1, 1), Size(num_rows, 1))
        self._times: list[list[float]] = [[], []]

    def __enter__(self) -> ForwardTimes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stepper.close()

    def turn(self, seconds: float = 0.03) -> None:
        """Time some of each size."""
        until = time.perf_counter() + seconds
        while True:
            for size, times in zip(self._sizes, self._times, strict=True):
                times.append(1e3 * self._stepper.step(size)["total"])
            if time.perf_counter() >= until:
                return

    def as_dict(self) -> dict[str, float]:
        """Median milliseconds, and by how much a batch raises throughput."""
        one, many = map(statistics.median, self._times)
        return {
            "one_row_ms": one,
            "all_rows_ms": many,
            "gain": self._sizes[1].rows * one / many,
        }


def grow_cache(cache: Cache, num_slots: int, num_entries: int) -> None:
    """Let a cache have room for so many slots of so many entries, so that it need not grow later.

    Otherwise one contender would pay for its growth.
    """
    slots = []
    try:
        for _ in range(num_slots):
            slots.append(cache.allocate())
            cache.reserve(slots[-1], num_entries)
    except (MemoryError, ValueError):
        pass  # a cache with a limit: it holds what it can
    finally:
        for slot in slots:
            cache.free(slot)


def _repeated_prompts(llm: LLM, path: str | None, num: int, tokens: int) -> list[list[int]]:
    """Token ids of so many prompts, over and over if there are fewer that fit the context.

    Args:
        tokens: of a reply.

    Raises:
        ConfigError: no prompt fits.
    """
    room = llm.target.max_context - tokens
    limit = None if llm.tokenizer is not None and path is None else num
    fitting = [ids for _, ids in encoded_prompts(llm, path, limit) if len(ids) <= room]
    if not fitting:
        raise ConfigError(f"no prompt leaves room for {tokens} tokens in the context")
    return [*islice(cycle(fitting), num)]
