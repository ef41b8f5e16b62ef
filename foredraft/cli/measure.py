"""`foredraft measure`: whether speculation is faster here, with which drafter, at which load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions
from foredraft.system.timing_lock import measuring

if TYPE_CHECKING:
    from foredraft.bench.record import Setting
    from foredraft.bench.report import Report
    from foredraft.llm import LLM

_USUAL = ("self_draft", "suffix")
_USUAL_TOKENS = 48


@dataclass(frozen=True)
class Contest:
    """The settings that are compared, and the loads and prompts under which they run.

    Attributes:
        loads: requests at once, with commas.
        drafters: names with commas, or all; auto and a few that suit most texts otherwise.
        variants: a further drafter with options of its own, such as "suffix shared=true"; may be
            repeated.
        prompts: JSON lines with category and turns; a few built-in ones otherwise.
        limit: at most this many prompts in all.
        acceptance: draft lengths with commas, such as 1,2,4,8: acceptance lengths by category, by
            the protocol of SPEED-Bench, instead of gains.
        golden: write the acceptance lengths into this file, as InferenceX keeps them.
        acceptance_length: the gain of a drafter with this acceptance length on this machine; no
            drafter runs.
    """

    loads: str = "1,4,16"
    drafters: str | None = None
    variants: Sequence[str] = ()
    prompts: str | None = None
    limit: int | None = None
    acceptance: str | None = None
    golden: Path | None = None
    acceptance_length: float | None = None


_LOADED = o.model(
    shown=("model", "draft_model", "weights"),
    drafter="auto",
    drafter_options={},
    prefix_caching=False,  # every drafter has to read its prompts
)


@o.with_options
def measure(
    load: Annotated[LoadOptions, _LOADED],
    params: Annotated[
        SamplingParams, o.sampling(shown=("temperature",), max_tokens=_USUAL_TOKENS, seed=0)
    ],
    contest: Annotated[
        Contest,
        o.Derived("Measured", shown=("loads", "drafters", "prompts", "limit", "acceptance")),
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

        foredraft measure --acceptance 1,2,4,8 --prompts speed-bench.jsonl --golden golden.yaml
    """
    from foredraft.bench.gains import gains_of, gains_report
    from foredraft.bench.record import Work, record, recorded_settings
    from foredraft.bench.report import check_outputs
    from foredraft.cli.display import progress_bar

    check_outputs(output, contest.golden)
    loads = sorted({*o.numbers("--loads", contest.loads, int, low=1)})
    named = _named(contest)  # reports errors before the model is loaded
    if contest.acceptance:
        _acceptance(load, params, contest).give(output, as_json=as_json)
        return
    llm = o.load_llm(replace(load, max_batch_size=max(loads)))
    if contest.acceptance_length is not None:
        _synthetic(llm, contest.acceptance_length, loads).give(output, as_json=as_json)
        return
    work = Work.of(llm, contest.prompts, contest.limit, params)
    settings = recorded_settings(llm, named or _usable(llm, contest.drafters))
    total = (1 + len(settings)) * sum(len(work.under(load).prompts) for load in loads)
    with measuring(lambda text: typer.echo(text, err=True)), progress_bar(total) as advance:
        recorded = record(llm, settings, work, loads, advance)
    about = f"{load.model} at temperature {params.temperature:g}"
    report = gains_report(gains_of(recorded), about, work.categories)
    report.give(output, as_json=as_json)
    if report.facts["num_different"] and llm.is_exact:
        raise typer.Exit(1)


def _acceptance(load: LoadOptions, params: SamplingParams, contest: Contest) -> Report:
    from foredraft.bench.acceptance import (
        CAP,
        acceptance_report,
        converse,
        figures,
        write_golden,
    )
    from foredraft.bench.prompts import load_prompts
    from foredraft.bench.record import AUTO
    from foredraft.cli.display import progress_bar
    from foredraft.server.formats import format_of

    lengths = o.numbers("--acceptance", contest.acceptance or "", int, low=1)
    prompts = load_prompts(contest.prompts, contest.limit)
    named = _named(contest)
    if params.max_tokens == _USUAL_TOKENS:
        params = replace(params, max_tokens=CAP)
    llm = o.load_llm(load)
    drafters = [each for each in named or _usable(llm, contest.drafters) if each.drafter != AUTO]
    settings = [replace(each, num_draft_tokens=n) for each in drafters for n in lengths]
    if contest.golden and len({each.name for each in drafters}) > 1:
        raise ConfigError("a golden file holds one curve: name one drafter with --drafters")
    rows: list[dict[str, Any]] = []
    with progress_bar(len(settings) * len(prompts)) as advance:
        for setting in settings:
            rows += figures(setting, converse(llm, setting, prompts, params, advance))
    about = {"model": llm.name, "temperature": params.temperature, "max_tokens": params.max_tokens}
    if contest.golden and llm.tokenizer:
        said = f"output_len: {params.max_tokens} | temp {params.temperature:g}"
        thinks = format_of(llm.tokenizer.tool_template).thinks(llm.tokenizer.chat_template or "")
        write_golden(contest.golden, llm.name or "model", rows, said, thinks=thinks)
    return acceptance_report(rows, about)


def _synthetic(llm: LLM, length: float, loads: Sequence[int]) -> Report:
    from foredraft.bench.acceptance import synthetic_report
    from foredraft.models.timing import measure_cost
    from foredraft.speculation import USUAL_CONTEXT

    if length < 1:
        raise ConfigError(f"--acceptance-length is {length:g}; a step commits at least one token")
    cost = llm.cost or measure_cost(llm.target)
    return synthetic_report(length, cost, loads, USUAL_CONTEXT)


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
    from foredraft.bench.record import AUTO, PLAIN, Setting
    from foredraft.drafters import ready_drafters

    ready = [name for name in ready_drafters(llm.target) if name != PLAIN]
    if llm.options.draft_model is not None:
        ready.insert(0, "draft_model")
    wanted_ones = ready if wanted == "all" else [n for n in ready if n in (*_USUAL, "draft_model")]
    return [Setting(AUTO), *map(Setting, wanted_ones)]
