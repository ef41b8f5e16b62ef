"""`foredraft measure`: whether speculation is faster here, with which drafter, at which load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options as o
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions
from foredraft.system.timing_lock import measuring

if TYPE_CHECKING:
    from foredraft.bench.record import Setting
    from foredraft.llm import LLM

_USUAL = ("self_draft", "suffix")


@dataclass(frozen=True)
class Contest:
    """The settings that are compared, and the loads and prompts under which they run.

    Attributes:
        loads: requests at once, with commas.
        drafters: names with commas, or all; auto and a few that suit most texts otherwise.
        variants: a further drafter with options of its own, such as "suffix shared=true"; may be
            repeated.
        prompts: JSON lines with id, category and turns; a few built-in ones otherwise.
        limit: at most this many prompts in all.
    """

    loads: str = "1,4,16"
    drafters: str | None = None
    variants: Sequence[str] = ()
    prompts: str | None = None
    limit: int | None = None


_LOADED = o.model(
    shown=("model", "draft_model", "weights"),
    drafter="auto",
    drafter_options={},
    prefix_caching=False,  # every drafter has to read its prompts
)


@o.with_options
def measure(
    load: Annotated[LoadOptions, _LOADED],
    params: Annotated[SamplingParams, o.sampling(shown=("temperature",), max_tokens=48, seed=0)],
    contest: Annotated[
        Contest,
        o.Derived("Measured", shown=("loads", "drafters", "prompts", "limit")),
    ],
    as_json: o.Json = False,
    output: o.Output = None,
) -> None:
    """Measure whether speculation is faster here: with which drafter, under which load.

    Drafters and plain decoding answer the same prompts in turns, on one loaded model, and each text
    is compared with the plain one. The table ends with the options to use. See
    docs/operate/measure.md.

    The exit status is 1 if a text differs where the model's texts are exact.

    Examples:

        foredraft measure

        foredraft measure --prompts mine.jsonl --loads 1,8 --temperature 0.7

        foredraft measure --drafters auto,suffix --output here.json
    """
    from foredraft.bench.gains import Gains, gains_report
    from foredraft.bench.record import Work, num_requests, record, recorded_settings
    from foredraft.bench.report import check_outputs
    from foredraft.cli.display import progress_bar

    check_outputs(output)
    loads = sorted({*o.numbers("--loads", contest.loads, int, low=1)})
    named = _named(contest)  # reports errors before the model is loaded
    llm = o.load_llm(replace(load, max_batch_size=max(loads)))
    work = Work.of(llm, contest.prompts, contest.limit, params)
    settings = recorded_settings(llm, named or _usable(llm, contest.drafters))
    total = num_requests(work, loads, 1 + len(settings))
    with measuring(lambda text: typer.echo(text, err=True)), progress_bar(total) as advance:
        recorded = record(llm, settings, work, loads, advance)
    about = f"{load.model} at temperature {params.temperature:g}"
    report = gains_report(Gains.of(recorded), about, work.categories)
    report.give(output, as_json=as_json)
    if report.facts["num_different"] and (llm.plan is None or llm.plan.is_exact):
        raise typer.Exit(1)


def _named(contest: Contest) -> list[Setting]:
    """The drafters and variants that are named; empty: those that can draft are to be found.

    Raises:
        ConfigError: one is not known.
    """
    from foredraft.bench.record import AUTO, PLAIN, Setting
    from foredraft.drafters import drafter_key, drafter_spec

    names = [] if contest.drafters == "all" else o.names(contest.drafters)
    found = []
    for text in (*names, *contest.variants):
        name, *options = text.split() or [""]
        name = AUTO if name == AUTO else drafter_key(name)
        if name != AUTO:
            drafter_spec(name)  # raises with the nearest name when it is unknown
        pairs = tuple(o.parse_assignments("--variant", options).items())
        found.append(Setting(name, options=pairs))
    return [each for each in found if each.drafter != PLAIN]


def _usable(llm: LLM, wanted: str | None) -> list[Setting]:
    """Drafters that can run here: a few that suit most texts, or all."""
    from foredraft.bench.record import AUTO, PLAIN, Setting
    from foredraft.drafters import ready_drafters

    ready = [name for name in ready_drafters(llm.target) if name != PLAIN]
    if llm.options.draft_model is not None:
        ready.insert(0, "draft_model")
    wanted_ones = ready if wanted == "all" else [n for n in ready if n in (*_USUAL, "draft_model")]
    return [Setting(AUTO), *map(Setting, wanted_ones)]
