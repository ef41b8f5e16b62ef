"""Gains of drafters as tables and sentences: the setting to run under each load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.bench.record import AUTO, PLAIN, Recording
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
        recording: what ran; with the drafter "none" nothing is drafted.
        nodes: drafted by a row in a step, on average.
        committed: tokens a step of a row.
        gain: throughput relative to plain decoding.
        low, high: between which 90 % of bootstraps over prompts have it.
        step_ms: of a full batch.
        tokens_per_s: of all requests together, in full steps that read no prompt.
        holds: share of drafted tokens that are accepted.
        break_even: the acceptance rate at which drafting neither gains nor loses; None: nothing is
            drafted.
        totals: by prompt: milliseconds of plain decoding for the tokens written, and those taken.
        num_different: texts that are not those of plain decoding.
    """

    recording: Recording
    nodes: float
    committed: float
    gain: float
    low: float
    high: float
    step_ms: float
    tokens_per_s: float
    holds: float
    break_even: float | None
    totals: Mapping[int, tuple[float, float]]
    num_different: int

    @classmethod
    def of(cls, recording: Recording, plain: Recording) -> Gain:
        """Tokens by time over those of plain decoding."""
        rows = [row for step in recording.steps for row in step.rows]
        drafted = sum(len(row.proposal.tree) for row in rows)
        step_ms, per_s = _pace(recording)
        plain_ms, plain_per_s = _pace(plain)
        gain, nodes = per_s / plain_per_s, drafted / len(rows)
        totals = _totals(recording, plain)
        low, high = _band(gain, totals)
        return cls(
            recording,
            nodes,
            sum(len(row.committed) for row in rows) / len(rows),
            gain,
            low,
            high,
            step_ms,
            per_s,
            sum(row.num_accepted for row in rows) / max(1, drafted),
            (step_ms / plain_ms - 1.0) / nodes if nodes else None,
            totals,
            recording.num_different(plain),
        )

    @property
    def drafter(self) -> str:
        return self.recording.setting.drafter

    def gain_on(self, prompts: Collection[int]) -> float:
        """The gain on some of the prompts, by their numbers."""
        found = [part for number, part in self.totals.items() if number in prompts]
        return sum(plain for plain, _ in found) / max(sum(ms for _, ms in found), 1e-9)

    def as_dict(self) -> dict[str, Any]:
        ran = self.recording
        own = {n: value for n, value in vars(self).items() if n not in ("recording", "totals")}
        return {
            "drafter": ran.setting.name,
            "flags": ran.setting.flags,
            "num_draft_tokens": ran.setting.num_draft_tokens,
            "load": ran.load,
            "first_ms": ran.first_ms,
            "joules": ran.joules,
            **own,
        }

    def row(self) -> dict[str, Any]:
        if self.drafter == PLAIN:
            return self.as_dict() | {"holds": None, "num_different": None}
        return self.as_dict() | {"band": f"{self.low:.2f}-{self.high:.2f}x"}


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


Gains = Mapping[int, Sequence[Gain]]
"""By load, the gain of each drafter; plain decoding comes first."""


def gains_of(recorded: Mapping[int, Sequence[Recording]]) -> Gains:
    """Gains of each drafter with the number of nodes that gained the most.

    Texts that differ are those of the number of nodes with the most of them.

    Args:
        recorded: by load, ascending: plain decoding, then each drafter by rising most nodes.
    """
    found: dict[int, Sequence[Gain]] = {}
    for load, (plain, *runs) in recorded.items():
        by_drafter = groupby(runs, lambda each: replace(each.setting, num_draft_tokens=None))
        tried = [[Gain.of(run, plain) for run in same] for _, same in by_drafter]
        best = [
            replace(
                max(same, key=lambda one: one.gain),
                num_different=max(one.num_different for one in same),
            )
            for same in tried
        ]
        found[load] = [Gain.of(plain, plain), *best]
    return found


def choice_of(gains: Sequence[Gain]) -> Gain:
    """The recommended setting under a load.

    It is "auto" unless another setting is clearly better, and no drafts unless drafting is
    clearly better.
    """
    best = max(gains, key=lambda each: each.gain)
    for usual in (PLAIN, AUTO):
        for each in gains:
            if each.drafter == usual and best.gain < _BETTER * each.gain:
                return each
    return best


def _sentence(load: int, gains: Sequence[Gain]) -> str:
    """The setting to run."""
    choice = choice_of(gains)
    said = f"{choice.recording.setting.flags}  ({choice.gain:.2f}x)"
    if choice.drafter == PLAIN:
        said = "nothing pays; --drafter none"
    for each in gains:
        if each.recording.reason:
            said += f"; {each.drafter} drafts nothing at the end: {each.recording.reason}"
    return f"{load} at once: {said}"


def gains_report(gains: Gains, about: str, categories: Sequence[str]) -> Report:
    """The table and its lines, and the gain by category of the prompts under the smallest load."""
    flat = [each for found in gains.values() for each in found]
    energy = {"J/token": "{joules:.2f}"} if any(each.recording.joules for each in flat) else {}
    tables = [Table("", [each.row() for each in flat], _COLUMNS | energy, "measured here")]
    load = min(gains)
    choice = choice_of(gains[load])
    rows = [*_by_category(choice, categories)]
    if len(rows) > 1 and choice.drafter != PLAIN:
        columns = {"category": "{category} ({prompts})", "gain": "{gain:.2f}x"}
        title = f"{choice.recording.setting.name}, {load} at once"
        tables.append(Table("categories", rows, columns, title))
    plan = {
        "machine": "here",
        "outlooks": [each.as_dict() for each in flat],
        "choices": {str(n): choice_of(found).recording.setting.flags for n, found in gains.items()},
    }
    different = sum(each.num_different for each in flat)
    facts = {"about": about, "plans": [plan], "num_different": different}
    return Report(tables, facts, [_sentence(*item) for item in gains.items()])


def _by_category(choice: Gain, categories: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys(categories):
        numbers = {number for number, each in enumerate(categories) if each == name}
        yield {"category": name, "gain": choice.gain_on(numbers), "prompts": len(numbers)}
