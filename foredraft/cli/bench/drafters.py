"""`foredraft bench drafters`: every drafter against plain decoding, and against peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import lists
from foredraft.cli import options as o
from foredraft.cli.bench.peers import LLAMA_PEERS, open_contender
from foredraft.cli.progress import progress_bar
from foredraft.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from foredraft.bench.compare import Overall, Summary, Trial
    from foredraft.bench.contenders import Contender
    from foredraft.bench.trial_log import TrialLog
    from foredraft.core.params import Coupling, SamplingParams
    from foredraft.llm import LLM
    from foredraft.options import LoadOptions

COUPLINGS: dict[str, tuple[Coupling, ...]] = {
    "seeded": ("seeded",),
    "drawn": ("drawn",),
    "both": ("seeded", "drawn"),
}
PEERS = (
    *("transformers", "transformers-ngram", "llama.cpp", "llama.cpp-ngram"),
    *LLAMA_PEERS,
)
_FAMILIES = ("transformers", "llama.cpp")


@dataclass(frozen=True)
class Entered:
    """Who runs."""

    only: Annotated[
        str | None,
        typer.Option(
            "--drafters",
            help="Names with commas; all that fit otherwise. Each has a fixed budget, but auto: "
            "what runs by default, as much as pays.",
        ),
    ] = None
    variant: Annotated[
        list[str] | None,
        typer.Option(help='One more, with options: "suffix shared=true". May be repeated.'),
    ] = None
    against: Annotated[
        str | None, typer.Option(help=f"Peers with commas: {', '.join(PEERS)} (greedy only).")
    ] = None
    draft_model: o.DraftModel = None
    noisy_draft_model: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Draft with the model itself, noise of this many standard deviations in its "
            "weights.",
        ),
    ] = None
    num_draft_tokens: o.NumDraftTokens = None
    random_weights: o.RandomWeights = None


@dataclass(frozen=True)
class Course:
    """What they run on."""

    prompts: o.Prompts = None
    limit: o.Limit = None
    temperature: Annotated[str, typer.Option("--temperature", help="One or more, with commas.")] = (
        "0"
    )
    top_p: o.TopP = 1.0
    top_k: o.TopK = 0
    coupling: Annotated[str, typer.Option("--coupling", help=f"{', '.join(COUPLINGS)}.")] = "seeded"
    max_tokens: o.MaxTokens = 128
    seed: Annotated[int, typer.Option(help="Used at temperatures above 0.")] = 0

    @property
    def temperatures(self) -> list[float]:
        return lists.numbers("--temperature", self.temperature)

    def params(self) -> SamplingParams:
        """But for the temperature."""
        from foredraft.core.params import SamplingParams

        return SamplingParams.of(
            max_tokens=self.max_tokens, seed=self.seed, top_p=self.top_p, top_k=self.top_k
        )


@o.with_option_objects
def drafters(
    running: o.ModelOptions,
    entered: Entered,
    course: Course,
    json_file: o.JsonFile = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Keep each run in this file as it is made, and go on from it."),
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw speed-ups into this PNG.")] = None,
) -> None:
    """Every drafter against plain decoding on the same prompts, by category.

    All run on one loaded target, peers in processes of their own, in rotating order; each text is
    compared with the plain one. Exit status 1 if one of ours differs; with coupling "drawn" texts
    may.
    """
    from foredraft.bench.compare import summaries
    from foredraft.bench.report import check_outputs

    check_outputs(json_file, plot)
    _check(entered, course)
    params = course.params()
    llm, variants, contenders = _loaded(running, entered, COUPLINGS[course.coupling])
    kept = None if log is None else _opened(log, llm, contenders, params, course.prompts)
    trials = _run(llm, contenders, course, kept)
    rows = summaries(trials, "none")
    _report(llm, rows, trials, _failures(contenders, trials), course.seed, json_file, plot)
    if any(not t.identical and t.contender in variants for t in trials):
        raise typer.Exit(1)


def _check(entered: Entered, course: Course) -> None:
    """Before anything is loaded.

    Raises:
        ConfigError: what is asked for does not go together.
    """
    at, peers = course.temperatures, lists.known_names("peer", entered.against, PEERS)
    if peers and any(at):
        raise ConfigError("peers draw other random numbers: compare with them at temperature 0")
    if course.coupling not in COUPLINGS:
        raise unknown("coupling", course.coupling, COUPLINGS)
    noisy, random = entered.noisy_draft_model is not None, entered.random_weights
    if noisy and (entered.draft_model or random):
        raise ConfigError("--noisy-draft-model is the model itself: name no other")
    if random and (peers or course.prompts):
        raise ConfigError(
            "random weights have no tokenizer: leave out --against and --prompts, or time a model"
        )


def _loaded(
    running: o.ModelOptions, entered: Entered, couplings: Sequence[Coupling]
) -> tuple[LLM, Mapping[str, Mapping[str, Any]], list[Contender]]:
    """The model, which drafters run on it with which options, and all who run."""
    from foredraft.bench.noisy_model import add_noise

    noise = entered.noisy_draft_model
    draft_model = entered.draft_model if noise is None else running.model
    asked = _options(running, draft_model, entered.num_draft_tokens)
    variants = _variants(entered.only, entered.variant or [], draft_model)
    llm = o.load_llm(asked, entered.random_weights)
    if noise is not None:
        add_noise(llm.drafter_context.draft_model, noise)
    peers = lists.names(entered.against)
    return llm, variants, _contenders(llm, asked, variants, couplings, peers)


def _options(
    running: o.ModelOptions, draft_model: str | None, num_draft_tokens: int | None
) -> LoadOptions:
    return o.load_options(
        running,
        drafter="draft_model" if draft_model else "auto",
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        max_batch_size=1,
        prefix_caching=False,  # all are to read their prompts
    )


def _report(
    llm: LLM,
    rows: Sequence[Summary],
    trials: Sequence[Trial],
    failures: Mapping[str, str],
    seed: int,
    json_file: str | None,
    plot: str | None,
) -> None:
    from foredraft.bench.compare import overall
    from foredraft.bench.plots import plot_speedups
    from foredraft.bench.report import write_json

    console = Console(highlight=False)
    _print_summaries(console, rows)
    peers = {row.contender for row in rows if row.contender.startswith(_FAMILIES)}
    lines = overall(rows, [name for name in peers if "ngram" not in name])
    _print_overall(console, lines, failures)
    if json_file:
        figures = _figures(llm, lines, rows, trials)
        write_json(json_file, figures | ({"failures": failures} if failures else {}), seed)
    if plot:
        plot_speedups(rows, plot)


def _failures(contenders: Sequence[Contender], trials: Sequence[Trial]) -> dict[str, str]:
    """Why contenders have no figures."""
    found = {trial.contender for trial in trials}
    missing = (one for one in contenders if one.name not in found)
    # Where a log is gone on with, the reason may have been said in another run.
    return {one.name: getattr(one, "failure", None) or "failed before" for one in missing}


def _variants(
    only: str | None, more: Sequence[str], draft_model: str | None
) -> dict[str, dict[str, Any]]:
    """Which drafters run with which options, by name; the baseline is the first of them.

    ``more`` alone replaces the drafters that run by default.
    """
    from foredraft.drafters import drafter_key, drafter_spec, usable_specs

    names = [drafter_key(name.strip()) for name in only.split(",")] if only else []
    if only is None and not more:
        for name, spec in usable_specs().items():
            if spec.trained is None and (draft_model or not spec.needs_draft_model):
                names.append(name)
    variants: dict[str, dict[str, Any]] = {name: {} for name in ("none", *names)}
    for text in more:
        name, *options = text.split() or [""]
        name = drafter_key(name)
        variants[" ".join((name, *options))] = o.parse_drafter_options(options)
    for name in variants:
        drafter = name.partition(" ")[0]
        if drafter != "auto":
            drafter_spec(drafter)  # says which name is nearest when it is unknown
    return variants


def _contenders(
    llm: LLM,
    asked: Any,
    variants: Mapping[str, Mapping[str, Any]],
    couplings: Sequence[Coupling],
    peers: Sequence[str],
) -> list[Contender]:
    from foredraft.bench.contenders import our_contenders

    ours = our_contenders(llm, asked, variants, couplings)
    tokenizer = llm.tokenizer
    if not peers:
        return [*ours]
    assert tokenizer is not None
    stop_ids, context = tokenizer.eos_token_ids, llm.target.max_context
    return [*ours, *(open_contender(llm, name, context, stop_ids) for name in peers)]


def _run(
    llm: LLM,
    contenders: Sequence[Contender],
    course: Course,
    log: TrialLog | None,
) -> list[Trial]:
    from contextlib import suppress
    from dataclasses import replace

    from foredraft.bench.compare import run_trials
    from foredraft.bench.prompts import load_prompts, random_prompts
    from foredraft.bench.turns import PeerFailed

    if llm.tokenizer is None:
        prompts = random_prompts(course.limit)
    else:
        encode = llm.tokenizer.encode_chat
        prompts = [
            (prompt, encode([{"role": "user", "content": prompt.text}]))
            for prompt in load_prompts(course.prompts, course.limit)
        ]
    params, temperatures = course.params(), course.temperatures
    room = llm.target.max_context - params.max_tokens
    prompts = [(prompt, ids) for prompt, ids in prompts if len(ids) <= room]
    for contender in contenders:  # the first forward of a process is slower
        with suppress(PeerFailed):  # again when it counts
            contender.run(prompts[0][1][-16:], replace(params, max_tokens=4))
    with progress_bar(len(prompts) * len(contenders) * len(temperatures)) as advance:
        return run_trials(contenders, prompts, params, temperatures, advance, log)


def _opened(
    path: Path,
    llm: LLM,
    contenders: Sequence[Contender],
    params: SamplingParams,
    prompts: str | None,
) -> TrialLog:
    from foredraft.bench.trial_log import TrialLog
    from foredraft.system.machine import describe_machine

    plan, machine = llm.plan, describe_machine()
    assert plan is not None
    compared = {
        "model": [plan.name, plan.dtype, plan.weights, plan.decoder],
        "machine": [machine["cpu"], machine["threads"], machine.get("instructions")],
        "contenders": [contender.name for contender in contenders],
        "sampling": [params.max_tokens, params.seed, params.top_p, params.top_k],
        "prompts": prompts,
    }
    return TrialLog(path, compared)


def _print_summaries(console: Console, rows: Sequence[Summary]) -> None:
    for temperature in dict.fromkeys(row.temperature for row in rows):
        table = Table(title=f"temperature {temperature:g}", title_justify="left", box=None,
                      padding=(0, 1, 0, 0))  # fmt: skip
        for title in ("category", "drafter"):
            table.add_column(title)
        for title in ("tok/s", "speed-up", "median", "request", "accepted/step",
                      "committed/step", "draft ms", "verify ms", "different"):  # fmt: skip
            table.add_column(title, justify="right")
        for row in rows:
            if row.temperature == temperature:
                table.add_row(*_cells(row), style="bold" if row.category == "macro" else "")
        console.print(table)


def _cells(row: Summary) -> tuple[str, ...]:
    return (
        f"{row.category} ({row.num_prompts})",
        row.contender,
        f"{row.tokens_per_s:.1f}",
        f"{row.speedup:.2f}x",
        f"{row.median_speedup:.2f}x",
        f"{row.request_speedup:.2f}x",
        f"{row.accepted_per_step:.2f}",
        f"{row.committed_per_step:.2f}",
        f"{row.draft_ms:.2f}",
        f"{row.verify_ms:.2f}",
        str(row.num_different),
    )


def _print_overall(console: Console, lines: Sequence[Overall], failures: Mapping[str, str]) -> None:
    table = Table(title="all categories, each as heavy", title_justify="left", box=None,
                  padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("drafter")
    for title in ("temperature", "tok/s", "speed-up", "worst", "committed/step", "over peers"):
        table.add_column(title, justify="right")
    for line in lines:
        over = "" if line.over_peers is None else f"{line.over_peers:.2f}x"
        worst = f"{line.worst:.2f}x ({line.worst_category})"
        table.add_row(line.contender, f"{line.temperature:g}", f"{line.tokens_per_s:.1f}",
                      f"{line.speedup:.2f}x", worst, f"{line.committed_per_step:.2f}",
                      over)  # fmt: skip
    console.print(table)
    for name, failure in failures.items():
        console.print(f"{name}: {failure}", markup=False)


def _figures(
    llm: LLM, lines: Sequence[Overall], rows: Sequence[Summary], trials: Sequence[Trial]
) -> dict[str, Any]:
    plan = llm.plan
    assert plan is not None
    return {
        "model": {
            "name": plan.name,
            "dtype": plan.dtype,
            "weights": plan.weights,
            "kernels": plan.decoder,
        },
        "overall": [vars(line) for line in lines],
        "summaries": [vars(row) for row in rows],
        "trials": [
            {
                "prompt": t.prompt.id,
                "category": t.prompt.category,
                "contender": t.contender,
                "temperature": t.temperature,
                "identical": t.identical,
                "num_tokens": len(t.run.token_ids),
                "first_s": t.run.first_s,
                "total_s": t.run.total_s,
                "draft_s": t.run.draft_s,
                "verify_s": t.run.verify_s,
                "stats": vars(t.run.stats) if t.run.stats else None,
            }
            for t in trials
        ],
    }
