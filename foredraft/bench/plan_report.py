"""Outlooks as tables and sentences: the setting to run, its highest useful load, and a check."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from foredraft.bench.outlook import Costs, Outlook, best_outlook, most_load, outlook
from foredraft.bench.record import AUTO, PLAIN, Recorded, Setting, Work, measured_rates
from foredraft.bench.report import Report, Table
from foredraft.bench.training import LearningCurve, Payback, paybacks
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.llm import LLM

_BETTER = 1.02
"""Least gain over "auto", or over no drafts at all, for a setting to be recommended."""
CHECK_ROUNDS = 2
"""Rounds of a check."""
_OTHER_SEEDS = 1_000_003
"""Difference between the seeds of recording and check."""
_COLUMNS = {
    "at once": "{load:d}",
    "drafter": "{drafter}",
    "of": "{num_draft_tokens:d}",
    "nodes": "{nodes:.1f}",
    "tokens a step": "{committed:.2f}",
    "gain": "{gain:.2f}x",
    "90 % of": "{band}",
    "ms a token": "{token_ms:.1f}",
    "first token": "{first_ms:.0f} ms",
    "requests/s": "{requests_per_s:.2f}",
    "hold": "{holds:.0%}",
    "break-even": "{break_even:.0%}",
}
CHECK_COLUMNS = {
    "at once": "{load:d}",
    "setting": "{flags}",
    "predicted": "{predicted:.2f}x",
    "90 % of": "{band}",
    "measured": "{measured:.2f}x",
    "rounds differ by": "{spread:.1%}",
    "error": "{error:+.1%}",
}


@dataclass(frozen=True)
class MachinePlan:
    """Predicted gain of all drafters on one machine.

    Attributes:
        machine: its name.
        outlooks: by load; plain decoding comes first.
        most_loads: by drafter, the most requests at once at which it pays; 0: never.
    """

    machine: str
    outlooks: Mapping[int, Sequence[Outlook]]
    most_loads: Mapping[str, int]

    @classmethod
    def of(cls, machine: str, recorded: Mapping[int, Recorded]) -> MachinePlan:
        """The best number of nodes of each drafter under each load.

        Args:
            recorded: by load, ascending.
        """
        found: dict[int, Sequence[Outlook]] = {}
        costs = [Costs(each.cost, each.plain) for each in recorded.values()]
        for (load, each), cost in zip(recorded.items(), costs, strict=True):
            bare = outlook(each.plain, load, cost, 0)
            found[load] = [bare, *(best_outlook(one, load, cost) for one in each.drafters)]
        by_drafter = zip(*(each.drafters for each in recorded.values()), strict=True)
        most = {
            same[0][0].setting(None).name: most_load(same, costs)
            for same in by_drafter
            if same[0][0].drafter != AUTO
        }
        return cls(machine, found, most)

    def choice(self, load: int) -> Outlook:
        """The recommended setting under a load.

        It is "auto" unless another setting is clearly better, and no drafts unless drafting is
        clearly better.
        """
        outlooks = self.outlooks[load]
        best = max(outlooks, key=lambda each: each.gain)
        for usual in (PLAIN, AUTO):
            for each in outlooks:
                if each.setting.drafter == usual and best.gain < _BETTER * each.gain:
                    return each
        return best

    @property
    def lines(self) -> list[str]:
        """Sentences: the setting to run, and the load up to which it pays."""
        said = []
        for load in self.outlooks:
            choice = self.choice(load)
            if choice.setting.drafter == PLAIN:
                said.append(f"{load} at once: nothing pays; --drafter none")
            else:
                said.append(f"{load} at once: {choice.setting.flags}  ({choice.gain:.2f}x)")
        for name, most in self.most_loads.items():
            if not most:
                said.append(f"{name} does not pay under any load")
            else:
                said.append(f"{name} pays up to {most} at once")
        return said

    def training(self, curve: LearningCurve, hours: Sequence[float]) -> list[Payback]:
        """Predicted gain of training its head for some more hours, under each load."""
        found = list[Payback]()
        for load, outlooks in self.outlooks.items():
            (head,) = (each for each in outlooks if each.setting.head is not None)
            found += paybacks(curve, head, self.choice(load), hours)
        return found

    def table(self) -> Table:
        """One row for each drafter and load."""
        rows = [_shown(each) for found in self.outlooks.values() for each in found]
        return Table("", rows, _COLUMNS, self.machine)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "machine": self.machine,
            "outlooks": [each.as_dict() for found in self.outlooks.values() for each in found],
            "choices": {str(load): self.choice(load).setting.flags for load in self.outlooks},
            "most_loads": dict(self.most_loads),
        }


def _shown(each: Outlook) -> dict[str, Any]:
    is_plain = each.setting.drafter == PLAIN
    band = None if is_plain else f"{each.low:.2f}-{each.high:.2f}x"
    return each.as_dict() | {"band": band, "holds": None if is_plain else each.holds}


@dataclass(frozen=True)
class Check:
    """A setting that was run.

    Attributes:
        outlook: its prediction.
        rounds: its speed over that of plain decoding, in each round.
    """

    outlook: Outlook
    rounds: Sequence[float]

    @property
    def measured(self) -> float:
        """The median round."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """Between the rounds, as a share: an error that is smaller says nothing."""
        return (max(self.rounds) - min(self.rounds)) / self.measured

    @property
    def error(self) -> float:
        """The error as a share of the expected gain."""
        return self.outlook.gain / self.measured - 1.0

    def as_dict(self) -> dict[str, Any]:
        """A row of the table, and of the file."""
        each = self.outlook
        return {
            "load": each.load,
            "flags": each.setting.flags,
            "predicted": each.gain,
            "band": f"{each.low:.2f}-{each.high:.2f}x",
            "measured": self.measured,
            "spread": self.spread,
            "error": self.error,
        }


def check(
    llm: LLM,
    outlooks: Sequence[Outlook],
    work: Work,
    advance: Callable[[str], None],
) -> list[Check]:
    """Run some settings of one load beside plain decoding, in turns.

    At temperatures above 0 their texts differ from the recorded ones. A setting is left out if each
    of its steps prefilled a prompt (long prompts, short replies), because no step can be timed.
    """
    drafting = [each for each in outlooks if each.setting.drafter != PLAIN]
    if not drafting:
        return []
    settings = [Setting(PLAIN), *(each.setting for each in drafting)]
    load = work.with_seeds_from(_OTHER_SEEDS).under(drafting[0].load)
    rates = measured_rates(llm, settings, load, CHECK_ROUNDS, advance)
    plain = rates[settings[0]]
    return [
        Check(each, [mine / base for mine, base in zip(rates[each.setting], plain, strict=True)])
        for each in drafting
        if all(plain) and all(rates[each.setting])
    ]


def num_check_requests(work: Work, outlooks: Sequence[Outlook]) -> int:
    """How often ``advance`` will be called for outlooks of one load."""
    drafting = sum(each.setting.drafter != PLAIN for each in outlooks)
    if not drafting:
        return 0
    return CHECK_ROUNDS * (1 + drafting) * len(work.under(outlooks[0].load).prompts)


def plan_report(
    plans: Sequence[MachinePlan],
    checks: Sequence[Check],
    about: str,
    training: Sequence[Payback] = (),
    tokens_per_day: float | None = None,
) -> Report:
    """Tables and lines of all machines, and whether training a head for longer pays here."""
    rows = [each.as_dict() for each in checks]
    tables = [plan.table() for plan in plans]
    if rows:
        tables.append(Table("checks", rows, CHECK_COLUMNS, "predicted and measured"))
    several = len(plans) > 1
    lines = [
        f"{plan.machine}: {line}" if several else line for plan in plans for line in plan.lines
    ]
    lines += [each.said(tokens_per_day) for each in training]
    facts = {"about": about, "plans": [plan.as_dict() for plan in plans]}
    facts["training"] = [vars(each) for each in training]
    return Report(tables, facts, lines)


def machine_cost(path: Path) -> CostModel:
    """The costs in a file of ``foredraft bench step --json``.

    Raises:
        ConfigError: it is no such file, or holds too little.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        context = int(str(found["context"]).split(",")[0])
        points = {
            int(figure["rows"]) * int(figure["tokens"]): float(figure["median_ms"])
            for figure in found["figures"]
            if figure["name"] in ("target", f"target at {context}") and "median_ms" in figure
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--machine {path} is no file of `foredraft bench step --json`: {error!r}"
        ) from error
    if len(points) < 2 or 1 not in points:
        raise ConfigError(
            f"--machine {path} holds the times of {sorted(points)} tokens; it takes those of 1 and "
            "of several, as `foredraft bench step --json FILE` measures them"
        )
    return CostModel(tuple(sorted(points.items())), context=context)
