"""Gains of drafters as tables and sentences: the setting to run, and up to which load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.bench.outlook import (
    Costs,
    Outlook,
    best_outlook,
    measured_outlook,
    most_load,
    outlook,
)
from foredraft.bench.record import AUTO, PLAIN, Recorded
from foredraft.bench.report import Report, Table
from foredraft.core.cost import Attention, CostModel
from foredraft.core.errors import ConfigError

HERE = "here"
_BETTER = 1.02
"""Least gain over "auto", or over no drafts at all, for a setting to be recommended."""
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
"""Tokens of a forward whose time the file keeps for other machines."""
_COLUMNS = {
    "at once": "{load:d}",
    "drafter": "{drafter}",
    "of": "{num_draft_tokens:d}",
    "a step": "{committed:.2f}",
    "gain": "{gain:.2f}x",
    "90 % of": "{band}",
    "tokens/s": "{tokens_per_s:.1f}",
    "first ms": "{first_ms:.0f}",
    "accepted": "{holds:.0%}",
    "differ": "{num_different:d}",
}


@dataclass(frozen=True)
class MachineGains:
    """The gain of each drafter on one machine.

    Attributes:
        machine: its name.
        outlooks: by load; plain decoding comes first.
        most_loads: by drafter, the most requests at once at which it is predicted to pay; 0: never.
        num_different: by load and drafter, the texts that are not those of plain decoding.
        reasons: by load, why the controller drafted nothing at the end, if it did not.
    """

    machine: str
    outlooks: Mapping[int, Sequence[Outlook]]
    most_loads: Mapping[str, int]
    num_different: Mapping[tuple[int, str], int]
    reasons: Mapping[int, str]

    @classmethod
    def of(cls, machine: str, recorded: Mapping[int, Recorded]) -> MachineGains:
        """The gains that were measured here, or that are predicted for another machine.

        Args:
            recorded: by load, ascending.
        """
        best = measured_outlook if machine == HERE else best_outlook
        found: dict[int, Sequence[Outlook]] = {}
        different, reasons = dict[tuple[int, str], int](), dict[int, str]()
        costs = [Costs(each.cost, each.plain) for each in recorded.values()]
        for (load, each), cost in zip(recorded.items(), costs, strict=True):
            bare = outlook(each.plain, load, cost, 0)
            found[load] = [bare, *(best(one, load, cost) for one in each.drafters)]
            for run in (run for same in each.drafters for run in same):
                place = load, run.setting.name
                different[place] = max(run.num_different(each.plain), different.get(place, 0))
                if run.setting.drafter == AUTO and run.reason:
                    reasons[load] = run.reason
        by_drafter = zip(*(each.drafters for each in recorded.values()), strict=True)
        most = {
            same[0][0].setting.name: most_load(same, costs)
            for same in by_drafter
            if same[0][0].setting.drafter != AUTO
        }
        return cls(machine, found, most, different, reasons)

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
            if load in self.reasons:
                said[-1] += f"; auto drafts nothing at the end: {self.reasons[load]}"
        for name, most in self.most_loads.items():
            pays = f"up to {most} at once" if most else "under no load"
            said.append(f"{name} is predicted to pay {pays}")
        return said

    def table(self) -> Table:
        """One row for each drafter and load."""
        rows = [self._shown(each) for found in self.outlooks.values() for each in found]
        title = "measured here" if self.machine == HERE else f"predicted for {self.machine}"
        return Table("", rows, _COLUMNS, title)

    def _shown(self, each: Outlook) -> dict[str, Any]:
        row = each.as_dict()
        if each.setting.drafter == PLAIN:
            return row | {"band": None, "holds": None}
        different = None
        if self.machine == HERE:
            different = self.num_different[each.load, each.setting.name]
        return row | {"band": f"{each.low:.2f}-{each.high:.2f}x", "num_different": different}

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "machine": self.machine,
            "outlooks": [each.as_dict() for found in self.outlooks.values() for each in found],
            "choices": {str(load): self.choice(load).setting.flags for load in self.outlooks},
            "most_loads": dict(self.most_loads),
            "reasons": {str(load): reason for load, reason in self.reasons.items()},
        }


def gains_report(
    gains: Sequence[MachineGains], cost: CostModel, about: str, categories: Sequence[str]
) -> Report:
    """Tables and lines of all machines, and the gain by category of the prompts here.

    Args:
        cost: of this machine's forwards, for use elsewhere.
        categories: of each prompt.
    """
    here = gains[0]
    load = min(here.outlooks)
    choice, plain = here.choice(load), here.outlooks[load][0]
    rows = [
        {"category": name, "gain": choice.gain_on(numbers), "prompts": len(numbers)}
        for name in dict.fromkeys(categories)
        if (numbers := {number for number, each in enumerate(categories) if each == name})
    ]
    columns = {"category": "{category} ({prompts})", "gain": "{gain:.2f}x"}
    title = f"{choice.setting.name}, {load} at once"
    tables = [each.table() for each in gains]
    if len(rows) > 1 and choice is not plain:
        tables.append(Table("categories", rows, columns, title))
    lines = [
        line if each.machine == HERE else f"{each.machine}: {line}"
        for each in gains
        for line in each.lines
    ]
    times = {str(size): ms for size, ms in cost.times(_SIZES)}
    facts = {
        "about": about,
        "plans": [each.as_dict() for each in gains],
        "forward": {"ms": times, **vars(cost.attention)},
        "num_different": sum(here.num_different.values()),
    }
    return Report(tables, facts, lines)


def machine_cost(path: Path) -> CostModel:
    """The times of forwards in a file of ``foredraft measure --output``.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["forward"]
        times = tuple((int(size), float(ms)) for size, ms in found["ms"].items())
        attention = Attention(float(found["entry_ms"]), float(found["pair_ms"]))
        return CostModel(times, attention)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--machine {path} is no file of `foredraft measure --output`: {error!r}"
        ) from error
