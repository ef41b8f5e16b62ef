"""`foredraft plan`: predict the speed-up of speculation here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions
from foredraft.system.timing_lock import measuring

if TYPE_CHECKING:
    from foredraft.bench.plan_report import Check, MachinePlan
    from foredraft.bench.record import Work
    from foredraft.core.cost import CostModel
    from foredraft.llm import LLM

_USUAL = ("blend", "ngram", "self_draft", "suffix")
_SAMPLED = o.Derived(
    "Sampling",
    defaults={"max_tokens": 48, "seed": 0},
    without=("n", "grammar", "prediction", "logprobs", "prompt_logprobs", "stop"),
)


@dataclass(frozen=True)
class Planned:
    """Options of `foredraft plan`.

    Attributes:
        prompts: JSON lines with id, category and turns; a few built-in ones otherwise.
        limit: at most this many prompts in all.
        from_trace: a trace to take drafts from, instead of running prompts.
        loads: requests at once, with commas.
        drafters: names with commas, or all; auto and a few that suit most texts otherwise.
        machines: another machine, as a file that `foredraft bench step --json FILE` wrote there;
            may be repeated.
        check: run the recommended setting, and show prediction and measurement side by side.
        head: folder of `foredraft train`: would training it for longer pay?
        train_hours: of training beyond what that head has had, with commas.
        tokens_per_day: that are generated in all, such as 5M, to tell in how many days it does.
    """

    prompts: str | None = None
    limit: int | None = None
    from_trace: Path | None = None
    loads: str = "1,4,16"
    drafters: str | None = None
    machines: Sequence[str] = ()
    check: bool = False
    head: Path | None = None
    train_hours: str = "1,8"
    tokens_per_day: int | None = None


@o.with_options
def plan(
    load: Annotated[
        LoadOptions, o.loading(drafter="auto", drafter_options={}, prefix_caching=False)
    ],
    params: Annotated[SamplingParams, _SAMPLED],
    planned: Annotated[Planned, o.Derived("Plan", parsers={"tokens_per_day": o.parse_count})],
    json_file: o.JsonFile = None,
) -> None:
    """Predict the speed-up of each drafter under each load, and recommend a setting.

    Each drafter drafts for some prompts, in turns, and its steps are priced by the controller's
    cost model, for this machine and others. See docs/operate/plan.md.

    Examples:

        foredraft plan

        foredraft plan --prompts mine.jsonl --loads 1,8 --temperature 0.7 --check

        foredraft plan --machine server.json --machine laptop.json
    """
    from foredraft.bench.plan_report import machine_cost, plan_report
    from foredraft.bench.record import Work
    from foredraft.bench.report import check_outputs
    from foredraft.bench.training import LearningCurve

    check_outputs(json_file)
    loads = sorted({*o.numbers("--loads", planned.loads, int, low=1)})
    machines = {Path(name).stem: machine_cost(Path(name)) for name in planned.machines}
    if planned.from_trace is not None and (planned.check or planned.head):
        raise ConfigError(
            "a trace holds no prompts, so nothing can be run: leave --check and --head out"
        )
    hours = o.numbers("--train-hours", planned.train_hours, float, low=0)
    curve = None if planned.head is None else LearningCurve.of(planned.head, params.temperature)
    _named(planned.drafters)  # reports errors before the model is loaded
    llm = o.load_llm(replace(load, max_batch_size=max(loads)))
    if planned.from_trace is not None:
        plans = _of_trace(llm, planned.from_trace, loads, machines)
        checks: list[Check] = []
    else:
        work = Work.of(llm, planned.prompts, planned.limit, params)
        with measuring(lambda text: typer.echo(text, err=True)):
            plans, checks = _of_prompts(llm, work, planned, loads, machines)
    about = f"{load.model} at temperature {params.temperature:g}"
    training = [] if curve is None else plans[0].training(curve, hours)
    plan_report(plans, checks, about, training, planned.tokens_per_day).give(json_file)


def _of_trace(
    llm: LLM, path: Path, loads: Sequence[int], machines: Mapping[str, CostModel]
) -> list[MachinePlan]:
    from foredraft.bench.plan_report import MachinePlan
    from foredraft.bench.record import Recorded, recorded_trace
    from foredraft.trace.files import read_trace

    plain, drafted = recorded_trace(read_trace(path))
    assert llm.cost is not None
    return [
        MachinePlan.of(name, dict.fromkeys(loads, Recorded(plain, [[drafted]], cost)))
        for name, cost in {"here": llm.cost, **machines}.items()
    ]


def _of_prompts(
    llm: LLM,
    work: Work,
    planned: Planned,
    loads: Sequence[int],
    machines: Mapping[str, CostModel],
) -> tuple[list[MachinePlan], list[Check]]:
    from foredraft.bench.plan_report import MachinePlan, check, num_check_requests
    from foredraft.bench.record import AUTO, num_requests, record, recorded_settings
    from foredraft.cli.display import progress_bar
    from foredraft.drafters.trained import read_info

    names = _named(planned.drafters) or _usable(llm, planned.drafters)
    path = planned.head
    head = None if path is None else (read_info(path).kind, str(path))
    here = recorded_settings(llm, names, head)
    # auto learns this machine's step times
    elsewhere = recorded_settings(llm, [name for name in names if name != AUTO])
    total = num_requests(work, loads, 1 + len(here))
    total += len(machines) * num_requests(work, loads, 1 + len(elsewhere))
    with progress_bar(total) as advance:
        plans = [MachinePlan.of("here", record(llm, here, work, loads, advance))]
        for name, cost in machines.items():
            recorded = record(llm, elsewhere, work, loads, advance, cost)
            plans.append(MachinePlan.of(name, recorded))
    if not planned.check:
        return plans, []
    choices = [[plans[0].choice(load)] for load in loads]
    with progress_bar(sum(num_check_requests(work, each) for each in choices)) as advance:
        return plans, [one for each in choices for one in check(llm, each, work, advance)]


def _named(wanted: str | None) -> list[str] | None:
    """The drafters that are named; None: those that can draft are to be found.

    Raises:
        ConfigError: one is not known.
    """
    from foredraft.bench.record import AUTO, PLAIN
    from foredraft.drafters import drafter_key, drafter_spec

    if wanted in (None, "all"):
        return None
    names = [AUTO if name == AUTO else drafter_key(name) for name in o.names(wanted)]
    for name in names:
        if name != AUTO:
            drafter_spec(name)  # raises with the nearest name when it is unknown
    return [name for name in names if name != PLAIN]


def _usable(llm: LLM, wanted: str | None) -> list[str]:
    """Drafters that can run here: a few that suit most texts, or all."""
    from foredraft.bench.record import AUTO, PLAIN
    from foredraft.drafters import ready_drafters

    ready = [name for name in ready_drafters(llm.target) if name != PLAIN]
    return [AUTO, *(name for name in ready if wanted == "all" or name in _USUAL)]
