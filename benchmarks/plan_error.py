"""``plan-error``: predictions of `foredraft plan` beside what runs, over prompts and loads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from foredraft.bench.plan_report import CHECK_COLUMNS, CHECK_ROUNDS, MachinePlan, check
from foredraft.bench.prompts import encoded_prompts
from foredraft.bench.record import PLAIN, Setting, Work, num_requests, record, recorded_settings
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.cli.display import progress_bar
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.options import LoadOptions

_COLUMNS = {"set": "{set}"} | CHECK_COLUMNS | {"chosen": "{chosen}"}


@dataclass(frozen=True)
class Compared:
    """A case that is planned and then run.

    Attributes:
        sets: categories of the prompts, with commas; each is planned by itself.
        loads: requests at once, with commas.
        drafters: names with commas.
        limit: at most this many prompts of a set.
        temperature: of sampling.
        max_tokens: of a reply.
        minutes: after which no further load of a set is begun. The same command goes on from what
            is in the file of --json.
    """

    sets: str = "chat,summarise,edit"
    loads: str = "1,2,4,8"
    drafters: str = "auto,suffix,blend,self_draft"
    limit: int = 8
    temperature: float = 0.0
    max_tokens: int = 64
    minutes: float | None = None


@o.with_options
def plan_error(
    load: Annotated[
        LoadOptions, o.loading(drafter="auto", drafter_options={}, prefix_caching=False)
    ],
    compared: Compared,
    prompts: o.Prompts = None,
    json_file: o.JsonFile = None,
) -> None:
    """Every drafter's predicted gain beside the measured one, by set of prompts and load.

    The chosen setting is compared with the best of those that were measured.
    """
    check_outputs(json_file)
    loads = sorted({*o.numbers("--loads", compared.loads, int, low=1)})
    began, rows = time.monotonic(), _rows_of(json_file, compared)
    llm = o.load_llm(replace(load, max_batch_size=max(loads)))
    works, names = dict(_works(llm, prompts, compared)), o.names(compared.drafters)
    known = {(row["set"], row["load"]) for row in rows}
    left = [(name, load) for name in works for load in loads if (name, load) not in known]
    settings = recorded_settings(llm, names)
    times = 1 + len(settings) + CHECK_ROUNDS * (1 + len(names))
    total = sum(num_requests(works[name], [load], times) for name, load in left)
    with progress_bar(total) as advance:
        for name, number in left:
            if compared.minutes and time.monotonic() - began > 60.0 * compared.minutes:
                break
            rows += _rows(llm, name, works[name], settings, number, advance)
            _report(rows, compared).give(json_file)


def _rows_of(json_file: str | None, compared: Compared) -> list[dict[str, Any]]:
    """Earlier measurements.

    Raises:
        ConfigError: with other settings, or the file is none of these.
    """
    if json_file is None or not Path(json_file).exists():
        return []
    try:
        found = json.loads(Path(json_file).read_text())
        rows: list[dict[str, Any]] = found["rows"]
        settings = found["settings"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{json_file} is no file of plan-error: {error!r}") from error
    if settings != _settings(compared):
        raise ConfigError(f"{json_file} was measured with {settings}: name another file")
    return rows


def _settings(compared: Compared) -> dict[str, Any]:
    """Fields shared by all rows of a file."""
    kept = asdict(compared)
    return {name: kept[name] for name in ("drafters", "limit", "temperature", "max_tokens")}


def _report(rows: Sequence[dict[str, Any]], compared: Compared) -> Report:
    """All rows, and how far apart they are."""
    chosen = [row for row in rows if row["chosen"]]
    drafted = [row for row in rows if row["error"] is not None]
    facts: dict[str, Any] = {
        "median_error": median(abs(row["error"]) for row in drafted),
        "median_spread_of_rounds": median(row["spread"] for row in drafted),
        "most_lost_by_choice": max(row["lost"] for row in chosen),
        "median_lost_by_choice": median(row["lost"] for row in chosen),
    }
    lines = [f"{name.replace('_', ' ')}: {value:.1%}" for name, value in facts.items()]
    facts["settings"] = _settings(compared)
    return Report([Table("rows", rows, _COLUMNS)], facts, lines)


def _works(llm: LLM, path: str | None, compared: Compared) -> Iterator[tuple[str, Work]]:
    """The prompts of each set."""
    params = SamplingParams.of(
        max_tokens=compared.max_tokens, temperature=compared.temperature, seed=0
    )
    room = llm.target.max_context - params.max_tokens
    known = [(p.category, ids) for p, ids in encoded_prompts(llm, path) if len(ids) <= room]
    for name in o.names(compared.sets):
        found = [ids for category, ids in known if category == name][: compared.limit]
        if not found:
            raise ConfigError(f"--sets {name!r} is no category; there are {sorted({*dict(known)})}")
        yield name, Work(found, params)


def _rows(
    llm: LLM,
    name: str,
    work: Work,
    settings: Sequence[Setting],
    load: int,
    advance: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One load of a set: planned and run at once, so that the machine is the same."""
    plan = MachinePlan.of("here", record(llm, settings, work, [load], advance))
    choice, outlooks = plan.choice(load), plan.outlooks[load]
    checks = check(llm, outlooks, work, advance)
    best = max([1.0, *(one.measured for one in checks)])
    rows = []
    for one in checks:
        is_chosen = one.outlook is choice
        chosen = {"chosen": "*" if is_chosen else "", "lost": best / one.measured - 1.0}
        rows.append({"set": name} | one.as_dict() | chosen)
    if choice.setting.drafter == PLAIN:
        plain: dict[str, Any] = {"predicted": 1.0, "measured": 1.0, "error": None, "spread": None}
        chosen = {"flags": choice.setting.flags, "chosen": "*", "lost": best - 1.0}
        rows.append({"set": name, "load": load} | plain | {"band": None} | chosen)
    return rows
