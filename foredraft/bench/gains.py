"""Gains of drafters as tables and sentences: the setting to run under each load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.bench.record import AUTO, PLAIN, Recording, Setting
from foredraft.bench.report import Report, Table

_BETTER = 1.02
"""Least gain over "auto", or over no drafts at all, for a setting to be recommended."""
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
_DRAWS, _BAND = 2000, (5.0, 95.0)
"""Bootstrap samples over prompts, and the percentiles of the 90 % interval."""


@dataclass(frozen=True)
class Gain:
    """Measured performance of a setting under a load. Times are in milliseconds.

    Attributes:
        setting: drafter and nodes; with "none" nothing is drafted.
        load: requests at once.
        nodes: drafted by a row in a step, on average.
        committed: tokens a step of a row.
        rates: the share of steps in which the draft held to depth 1, 2, …
        gain: throughput relative to plain decoding.
        low, high: between which 90 % of bootstraps over prompts have it.
        step_ms: of a full batch.
        tokens_per_s: of all requests together, in full steps that read no prompt.
        first_ms: until the first token of a request that joins the others.
        requests_per_s: that ended.
        holds: share of drafted tokens that are accepted.
        break_even: the acceptance rate at which drafting neither gains nor loses; None: nothing is
            drafted.
        totals: by prompt: milliseconds of plain decoding for the tokens written, and those taken.
        joules: of a token, prefill included; None where the machine does not tell it.
    """

    setting: Setting
    load: int
    nodes: float
    committed: float
    rates: tuple[float, ...]
    gain: float
    low: float
    high: float
    step_ms: float
    tokens_per_s: float
    first_ms: float
    requests_per_s: float
    holds: float
    break_even: float | None
    totals: Mapping[int, tuple[float, float]]
    joules: float | None = None

    @classmethod
    def of(cls, recording: Recording, plain: Recording) -> Gain:
        """Tokens by time over those of plain decoding."""
        rows = [row for step in recording.steps for row in step.rows]
        drafted = sum(len(row.proposal.tree) for row in rows)
        accepted = [row.num_accepted for row in rows]
        step_ms, per_s = _pace(recording)
        plain_ms, plain_per_s = _pace(plain)
        gain = per_s / plain_per_s
        totals = _totals(recording, plain)
        low, high = _band(gain, totals)
        nodes = drafted / len(rows)
        return cls(
            recording.setting,
            recording.load,
            nodes,
            sum(len(row.committed) for row in rows) / len(rows),
            tuple(
                sum(held >= depth for held in accepted) / len(rows)
                for depth in range(1, max(accepted) + 1)
            ),
            gain,
            low,
            high,
            step_ms,
            per_s,
            recording.first_ms,
            recording.requests_per_s,
            sum(accepted) / drafted if drafted else 0.0,
            (step_ms / plain_ms - 1.0) / nodes if nodes else None,
            totals,
            recording.joules,
        )

    def gain_on(self, prompts: Collection[int]) -> float:
        """The gain on some of the prompts, by their numbers."""
        found = [part for number, part in self.totals.items() if number in prompts]
        return sum(plain for plain, _ in found) / max(sum(ms for _, ms in found), 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        setting = {"drafter": self.setting.name, "flags": self.setting.flags,
                   "num_draft_tokens": self.setting.num_draft_tokens}  # fmt: skip
        left_out = ("setting", "totals")
        return setting | {name: value for name, value in vars(self).items() if name not in left_out}


def _pace(recording: Recording) -> tuple[float, float]:
    """Milliseconds of a step, and tokens a second."""
    timed = [*recording.timed()]
    ms = sum(ms for _, ms in timed)
    return ms / len(timed), 1e3 * sum(step.committed for step, _ in timed) / ms


def _by_prompt(recording: Recording) -> dict[int, tuple[int, float]]:
    """Tokens and milliseconds of each prompt: the rows of a step share its time alike."""
    found = defaultdict[int, list[tuple[int, float]]](list)
    for step, ms in recording.timed():
        for row in step.rows:
            prompt = recording.prompts[row.request_id]
            found[prompt].append((len(row.committed), ms / step.num_rows))
    return {
        prompt: (sum(count for count, _ in parts), sum(ms for _, ms in parts))
        for prompt, parts in found.items()
    }


def _totals(recording: Recording, plain: Recording) -> dict[int, tuple[float, float]]:
    """See `Gain.totals`, of prompts that both have answered."""
    mine, theirs = _by_prompt(recording), _by_prompt(plain)
    return {
        prompt: (count * theirs[prompt][1] / theirs[prompt][0], ms)
        for prompt, (count, ms) in mine.items()
        if prompt in theirs
    }


def _band(gain: float, totals: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """The interval of the gain, by a bootstrap over prompts."""
    totals_P2 = np.array([*totals.values()]).reshape(-1, 2)
    if not len(totals_P2):
        return gain, gain
    sums = resampled(totals_P2, np.random.default_rng(0))
    return interval(gain, sums[:, 0] / sums[:, 1], _BAND)


def resampled(totals_PC: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    """Sums [draws, C] over prompts drawn with replacement; the figures C of a prompt stay together.

    One prompt fewer is drawn than there are: the variance would be too small otherwise, by half for
    two prompts (Rao and Wu 1988).
    """
    number = len(totals_PC)
    drawn = random.integers(number, size=(_DRAWS, max(1, number - 1)))
    return np.asarray(totals_PC[drawn].sum(1))


def interval(
    figure: float, drawn: NDArray[Any], percentiles: tuple[float, float]
) -> tuple[float, float]:
    """Percentiles of a figure's bootstrap samples, scaled so that their median is the figure.

    The figure is a ratio of sums, and sums of fewer prompts have a larger ratio on average.
    """
    low, high = np.percentile(drawn, percentiles) * (figure / np.median(drawn))
    return float(low), float(high)


@dataclass(frozen=True)
class Gains:
    """The gain of each drafter.

    Attributes:
        by_load: plain decoding comes first.
        num_different: by load and drafter, the texts that are not those of plain decoding.
        reasons: by load, why the controller drafted nothing at the end, if it did not.
    """

    by_load: Mapping[int, Sequence[Gain]]
    num_different: Mapping[tuple[int, str], int]
    reasons: Mapping[int, str]

    @classmethod
    def of(cls, recorded: Mapping[int, Sequence[Recording]]) -> Gains:
        """Of each drafter with the number of nodes that gained the most.

        Args:
            recorded: by load, ascending: plain decoding, then each drafter by rising most nodes.
        """
        found: dict[int, Sequence[Gain]] = {}
        different, reasons = dict[tuple[int, str], int](), dict[int, str]()
        for load, (plain, *runs) in recorded.items():
            by_drafter = groupby(runs, lambda each: replace(each.setting, num_draft_tokens=None))
            tried = [[Gain.of(run, plain) for run in same] for _, same in by_drafter]
            best = (max(same, key=lambda one: one.gain) for same in tried)
            found[load] = [Gain.of(plain, plain), *best]
            for run in runs:
                place = load, run.setting.name
                different[place] = max(run.num_different(plain), different.get(place, 0))
                if run.setting.drafter == AUTO and run.reason:
                    reasons[load] = run.reason
        return cls(found, different, reasons)

    def choice(self, load: int) -> Gain:
        """The recommended setting under a load.

        It is "auto" unless another setting is clearly better, and no drafts unless drafting is
        clearly better.
        """
        gains = self.by_load[load]
        best = max(gains, key=lambda each: each.gain)
        for usual in (PLAIN, AUTO):
            for each in gains:
                if each.setting.drafter == usual and best.gain < _BETTER * each.gain:
                    return each
        return best

    @property
    def lines(self) -> list[str]:
        """Sentences: the setting to run."""
        said = []
        for load in self.by_load:
            choice = self.choice(load)
            if choice.setting.drafter == PLAIN:
                said.append(f"{load} at once: nothing pays; --drafter none")
            else:
                said.append(f"{load} at once: {choice.setting.flags}  ({choice.gain:.2f}x)")
            if load in self.reasons:
                said[-1] += f"; auto drafts nothing at the end: {self.reasons[load]}"
        return said

    def table(self) -> Table:
        """One row for each drafter and load."""
        rows = [self._shown(each) for found in self.by_load.values() for each in found]
        energy = {"J/token": "{joules:.2f}"} if any(row["joules"] for row in rows) else {}
        return Table("", rows, _COLUMNS | energy, "measured here")

    def _shown(self, each: Gain) -> dict[str, Any]:
        row = each.as_dict()
        if each.setting.drafter == PLAIN:
            return row | {"band": None, "holds": None}
        different = self.num_different[each.load, each.setting.name]
        return row | {"band": f"{each.low:.2f}-{each.high:.2f}x", "num_different": different}

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "machine": "here",
            "outlooks": [each.as_dict() for found in self.by_load.values() for each in found],
            "choices": {str(load): self.choice(load).setting.flags for load in self.by_load},
            "reasons": {str(load): reason for load, reason in self.reasons.items()},
        }


def gains_report(gains: Gains, about: str, categories: Sequence[str]) -> Report:
    """The table and its lines, and the gain by category of the prompts under the smallest load.

    Args:
        categories: of each prompt.
    """
    load = min(gains.by_load)
    choice, plain = gains.choice(load), gains.by_load[load][0]
    rows = [
        {"category": name, "gain": choice.gain_on(numbers), "prompts": len(numbers)}
        for name in dict.fromkeys(categories)
        if (numbers := {number for number, each in enumerate(categories) if each == name})
    ]
    columns = {"category": "{category} ({prompts})", "gain": "{gain:.2f}x"}
    title = f"{choice.setting.name}, {load} at once"
    tables = [gains.table()]
    if len(rows) > 1 and choice is not plain:
        tables.append(Table("categories", rows, columns, title))
    different = sum(gains.num_different.values())
    facts = {"about": about, "plans": [gains.as_dict()], "num_different": different}
    return Report(tables, facts, gains.lines)
