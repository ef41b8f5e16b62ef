"""``drafters``: every drafter against plain decoding and against other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.compare import Trial, comparison_report, summaries
from benchmarks.contenders import Contender, our_contenders
from benchmarks.course import (
    ENTERED,
    Course,
    Field,
    run_course,
    variants_of,
    with_draft_model,
)
from benchmarks.noisy_model import add_noise
from benchmarks.peers import LLAMA_PEERS, open_contender, peer_names
from benchmarks.plots import check_plot, plot_speedups
from benchmarks.random_model import load_llm
from benchmarks.trial_log import TrialLog
from foredraft.bench.report import check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError, unknown
from foredraft.core.params import Coupling, SamplingParams
from foredraft.llm import LLM
from foredraft.options import LoadOptions
from foredraft.system.machine import describe_machine

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
class Others:
    """Other engines to run, and their models.

    Attributes:
        against: other engines with commas (greedy only).
        coupling: seeded, drawn or both.
        noisy_draft_model: draft with the model itself, noise of this many standard deviations in
            its weights.
        random_weights: instead of a model this shape with random weights, for timing only.
    """

    against: str | None = None
    coupling: str = "seeded"
    noisy_draft_model: float | None = None
    random_weights: str | None = None

    @property
    def peers(self) -> list[str]:
        return peer_names(self.against, PEERS)


@o.with_options
def drafters(
    load: Annotated[LoadOptions, ENTERED],
    entered: Field,
    course: Course,
    others: Others,
    output: o.Output = None,
    turns: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Load the model for each drafter, and let them take turns after this many tokens "
            "of a reply: slow seconds of the machine are then everyone's.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Keep each run in this file as it is made, and go on from it."),
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw speed-ups into this PNG.")] = None,
) -> None:
    """Compare drafters with plain decoding and other engines on the same prompts, by category.

    All run on one loaded target, other engines in processes of their own, in rotating order; each
    text is compared with the plain one. The exit status is 1 if one of ours differs; with coupling
    "drawn" texts may.
    """
    check_outputs(output)
    check_plot(plot)
    params = course.params()
    _check(load, others, course)
    if turns and (others.peers or others.coupling == "both"):
        raise ConfigError("only our drafters take turns, with one coupling: leave out --turns")
    llm, variants, contenders = _loaded(load, entered, others, is_shared=not turns)
    kept = None if log is None else _opened(log, llm, contenders, params, course.prompts)
    trials = run_course(llm, contenders, course, kept, turns)
    peers = [c.name for c in contenders if c.name.startswith(_FAMILIES) and "ngram" not in c.name]
    comparison_report(llm, trials, course.seed, peers, _failures(contenders, trials)).give(output)
    if plot:
        plot_speedups(summaries(trials, "none"), plot)
    if any(not t.identical and t.contender in variants for t in trials):
        raise typer.Exit(1)


def _check(load: LoadOptions, others: Others, course: Course) -> None:
    """Before anything is loaded.

    Raises:
        ConfigError: the options contradict each other.
    """
    if others.peers and any(course.temperatures):
        raise ConfigError("peers draw other random numbers: compare with them at temperature 0")
    if others.coupling not in COUPLINGS:
        raise unknown("coupling", others.coupling, COUPLINGS)
    if others.noisy_draft_model is not None and (load.draft_model or others.random_weights):
        raise ConfigError("--noisy-draft-model is the model itself: name no other")
    if others.random_weights and (others.peers or course.prompts):
        raise ConfigError(
            "random weights have no tokenizer: leave out --against and --prompts, or time a model"
        )


def _loaded(
    load: LoadOptions, entered: Field, others: Others, *, is_shared: bool
) -> tuple[LLM, Mapping[str, Mapping[str, Any]], list[Contender]]:
    """The model, which drafters run on it with which options, and all contenders.

    Args:
        is_shared: one model serves all; else each has its own, and the first one's is returned.
    """
    noise = others.noisy_draft_model
    if noise is not None:  # weights in few bits take no noise
        load = replace(load, draft_model=load.model, draft_weights="bf16")
    load = with_draft_model(load)
    variants = variants_of(entered, load.draft_model)
    groups = [variants] if is_shared else [{name: variants[name]} for name in variants]
    llms, contenders = [], list[Contender]()
    for group in groups:
        llms.append(load_llm(load, others.random_weights))
        if noise is not None:
            add_noise(llms[-1].drafter_context.draft_model, noise)
        contenders += our_contenders(llms[-1], load, group, COUPLINGS[others.coupling])
    llm = llms[0]
    if others.peers:
        assert llm.tokenizer is not None
        stop_ids, context = llm.tokenizer.eos_token_ids, llm.target.max_context
        contenders += [open_contender(llm, name, context, stop_ids) for name in others.peers]
    return llm, variants, contenders


def _failures(contenders: Sequence[Contender], trials: Sequence[Trial]) -> dict[str, str]:
    """Why contenders have no figures."""
    with_figures = {trial.contender for trial in trials}
    missing = (one for one in contenders if one.name not in with_figures)
    # Where a log is gone on with, the reason may have been said in another run.
    return {one.name: getattr(one, "failure", None) or "failed before" for one in missing}


def _opened(
    path: Path,
    llm: LLM,
    contenders: Sequence[Contender],
    params: SamplingParams,
    prompts: str | None,
) -> TrialLog:
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
