"""`foredraft bench …`: measurements on the user's own model, machine and server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions
from foredraft.system.timing_lock import measuring

if TYPE_CHECKING:
    from foredraft.bench.compare import RunLog, Trial
    from foredraft.bench.contenders import Contender
    from foredraft.bench.step import Size
    from foredraft.core.params import SamplingParams
    from foredraft.llm import LLM

app = typer.Typer(no_args_is_help=True)
Rounds = Annotated[int, typer.Option(min=1, help="Samples of each figure.")]


@app.callback()
def hold_the_machine(context: typer.Context) -> None:
    """Measure on this machine: interleaved, with medians. Trainings stand still meanwhile."""
    context.with_resource(measuring(lambda text: typer.echo(text, err=True)))


# ------------------------------------------------------------------------------- bench drafters


@dataclass(frozen=True)
class Field:
    """The drafters that are compared.

    Attributes:
        drafters: names with commas; all that can run otherwise. Each has a fixed budget, except
            auto: the default drafter under the adaptive controller.
        variants: a further drafter with options of its own, such as "suffix shared=true".
    """

    drafters: str | None = None
    variants: Sequence[str] = ()


@dataclass(frozen=True)
class Course:
    """The prompts that every drafter continues, and how.

    Attributes:
        prompts: JSON lines with id, category and turns; a few built-in ones otherwise.
        limit: at most this many prompts in all.
        temperature: one or more, with commas.
        top_p: keep the most likely tokens up to this mass.
        top_k: keep the k most likely tokens; 0 keeps all.
        max_tokens: most tokens of a reply.
        seed: used at temperatures above 0.
    """

    prompts: str | None = None
    limit: int | None = None
    temperature: str = "0"
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    seed: int = 0

    @property
    def temperatures(self) -> list[float]:
        return o.numbers("--temperature", self.temperature, float)

    def params(self) -> SamplingParams:
        """Parameters of all requests except the temperature."""
        from foredraft.core.params import SamplingParams

        return SamplingParams.of(
            max_tokens=self.max_tokens, seed=self.seed, top_p=self.top_p, top_k=self.top_k
        )


ENTERED = o.loading(
    drafter="auto",
    drafter_options={},
    max_batch_size=1,
    prefix_caching=False,  # every drafter has to read its prompts
)


@app.command()
@o.with_options
def drafters(
    load: Annotated[LoadOptions, ENTERED],
    entered: Field,
    course: Course,
    json_file: o.JsonFile = None,
) -> None:
    """Compare drafters with plain decoding on the same prompts, by category.

    All run on one loaded model, in rotating order, and each text is compared with the plain one.
    The exit status is 1 if a text differs.

    Examples:

        foredraft bench drafters

        foredraft bench drafters --drafters suffix,auto --prompts my-prompts.jsonl
    """
    from foredraft.bench.compare import comparison_report
    from foredraft.bench.contenders import our_contenders
    from foredraft.bench.report import check_outputs

    check_outputs(json_file)
    course.params()  # reports errors before the model is loaded
    load, variants = with_draft_model(load), variants_of(entered, load.draft_model)
    llm = o.load_llm(load)
    contenders = our_contenders(llm, load, variants)
    trials = run_course(llm, contenders, course)
    comparison_report(llm, trials, course.seed).give(json_file)
    if not all(trial.identical for trial in trials):
        raise typer.Exit(1)


def with_draft_model(load: LoadOptions) -> LoadOptions:
    """The options under which the draft model is loaded, if one is named."""
    return replace(load, drafter="draft_model") if load.draft_model else load


def variants_of(entered: Field, draft_model: str | None) -> dict[str, dict[str, Any]]:
    """Which drafters run with which options, by name; the baseline is the first of them.

    ``entered.variants`` alone replace the drafters that run by default.
    """
    from foredraft.drafters import drafter_key, drafter_spec, usable_specs

    only, more = entered.drafters, entered.variants
    names = [*map(drafter_key, o.names(only))]
    if only is None and not more:
        for name, spec in usable_specs().items():
            if spec.trained is None and (draft_model or not spec.needs_draft_model):
                names.append(name)
    variants: dict[str, dict[str, Any]] = {name: {} for name in ("none", *names)}
    for text in more:
        name, *options = text.split() or [""]
        name = drafter_key(name)
        variants[" ".join((name, *options))] = o.parse_assignments("--variant", options)
    for name in variants:
        drafter = name.partition(" ")[0]
        if drafter != "auto":
            drafter_spec(drafter)  # raises with the nearest name when it is unknown
    return variants


def run_course(
    llm: LLM, contenders: Sequence[Contender], course: Course, log: RunLog | None = None
) -> list[Trial]:
    """Every contender on every prompt, with a progress bar."""
    from foredraft.bench.compare import run_trials
    from foredraft.bench.prompts import encoded_prompts
    from foredraft.bench.timing import PeerFailed
    from foredraft.cli.display import progress_bar

    params, temperatures = course.params(), course.temperatures
    room = llm.target.max_context - params.max_tokens
    prompts = [
        (prompt, ids)
        for prompt, ids in encoded_prompts(llm, course.prompts, course.limit)
        if len(ids) <= room
    ]
    if not prompts:
        raise ConfigError(f"no prompt leaves room for {params.max_tokens} tokens in the context")
    for contender in contenders:  # the first forward of a process is slower
        with suppress(PeerFailed):  # it fails again when it counts
            contender.run(prompts[0][1][-16:], replace(params, max_tokens=4))
    with progress_bar(len(prompts) * len(contenders) * len(temperatures)) as advance:
        return run_trials(contenders, prompts, params, temperatures, advance, log)


# ----------------------------------------------------------------------------------- bench step


@dataclass(frozen=True)
class Forwards:
    """The forwards that are timed.

    Attributes:
        tokens: tokens of a row in one forward, with commas.
        rows: rows of the batch, with commas.
        context: tokens already in the cache, with commas.
    """

    tokens: str = "1,2,4,8,16,32"
    rows: str = "1"
    context: str = "256"

    @property
    def contexts(self) -> list[int]:
        return o.numbers("--context", self.context, int, low=1)

    @property
    def sizes(self) -> list[Size]:
        from foredraft.bench.step import Size

        counts = o.numbers("--tokens", self.tokens, int, low=1)
        return [Size(r, n) for r in o.numbers("--rows", self.rows, int, low=1) for n in counts]


@app.command()
@o.with_options
def step(
    load: Annotated[LoadOptions, o.loading()],
    forwards: Forwards,
    rounds: Rounds = 15,
    json_file: o.JsonFile = None,
) -> None:
    """Time a forward of n tokens: the model, and its drafter, in rotating order.

    Speculation can gain only as much as a forward of n tokens is cheaper than n forwards of one.
    The floor is the time to read all weights once at the measured bandwidth, or to make all
    products at the measured rate.
    """
    from foredraft.bench.report import check_outputs
    from foredraft.bench.step import own_steppers, step_report

    check_outputs(json_file)
    sizes, contexts = forwards.sizes, forwards.contexts
    load = replace(load, max_batch_size=max(size.rows for size in sizes))
    llm = o.load_llm(load)
    steppers = own_steppers({"target": llm}, contexts, sizes)
    figures = timed(steppers, sizes, rounds)
    step_report({"target": llm}, figures, contexts, sizes).give(json_file)


def timed(steppers: Sequence[Any], sizes: Sequence[Size], rounds: int) -> Sequence[Any]:
    """Figures of all steppers, with a progress bar."""
    from foredraft.bench.step import time_steps
    from foredraft.cli.display import progress_bar

    with progress_bar(rounds + 1) as advance:
        return time_steps(steppers, sizes, rounds, lambda: advance("timing"))


# ---------------------------------------------------------------------------------- bench serve


@app.command()
def serve(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="A running server, or NAME=URL; may be repeated. http://127.0.0.1:8000 otherwise."
        ),
    ] = None,
    clients: Annotated[str, typer.Option(help="Clients at a time, with commas.")] = "1,4,16",
    prompts: o.Prompts = None,
    limit: o.Limit = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, after one that warms up.")] = 3,
    api_key: Annotated[
        str | None, typer.Option(envvar="FOREDRAFT_BENCH_KEY", help="Sent as a bearer token.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to ask for, where a server needs its name.")
    ] = None,
    json_file: o.JsonFile = None,
) -> None:
    """Load running servers with chat requests: tokens a second, time to the first token.

    It measures any server with OpenAI's chat interface. Several servers get the same prompts in
    rotating order; no prompt comes twice, so that no server answers from its prefix cache.

    Examples:

        foredraft bench serve --clients 1,8

        foredraft bench serve --url ours=http://127.0.0.1:8000 --url vllm=http://127.0.0.1:8001
    """
    from foredraft.bench.prompts import load_prompts
    from foredraft.bench.report import check_outputs
    from foredraft.bench.serve import Task, compare, serving_report

    check_outputs(json_file)
    servers = dict(map(_named_url, url or ["http://127.0.0.1:8000"]))
    texts = [prompt.text for prompt in load_prompts(prompts, limit)]
    task = Task(texts, max_tokens, temperature, api_key, model)
    counts = o.numbers("--clients", clients, int, low=1)
    serving_report(compare(servers, counts, task, rounds)).give(json_file)


def _named_url(text: str) -> tuple[str, str]:
    if text.startswith(("http://", "https://")):
        return text.partition("://")[2].rstrip("/"), text.rstrip("/")
    name, equals, url = text.partition("=")
    if not equals or not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {text!r} is neither a URL nor NAME=URL")
    return name, url.rstrip("/")
