"""Contenders against each other on the same prompts, interleaved, each text checked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from benchmarks.contenders import Contender, ContenderRun, OurContender
from benchmarks.intervals import with_intervals
from benchmarks.timing import PeerFailed
from foredraft.bench.prompts import BenchPrompt
from foredraft.bench.report import Report, Table
from foredraft.core.params import SamplingParams

if TYPE_CHECKING:
    from foredraft.llm import LLM

_T = TypeVar("_T")
Runs = dict[str, ContenderRun]
"""By contender."""


class RunLog(Protocol):
    """Keeps runs, so that a long comparison goes on where it was stopped."""

    def find(self, prompt: str, temperature: float) -> Runs | None: ...

    def add(self, prompt: str, temperature: float, runs: Runs) -> None: ...


@dataclass(frozen=True)
class Trial:
    """One contender's run on one prompt."""

    prompt: BenchPrompt
    contender: str
    temperature: float
    run: ContenderRun
    identical: bool
    """Whether the token ids equal the first contender's."""


def run_trials(
    contenders: Sequence[Contender],
    prompts: Sequence[tuple[BenchPrompt, Sequence[int]]],
    params: SamplingParams,
    temperatures: Sequence[float],
    advance: Callable[[str], None],
    log: RunLog | None = None,
    turns: int | None = None,
) -> list[Trial]:
    """Every contender on every prompt, in rotating order, one after the other.

    A peer that fails on one prompt is dropped with all its trials: means over different prompts are
    not comparable.

    Args:
        contenders: the first is the baseline that texts are compared with.
        prompts: each with its token ids.
        params: shared by all; the temperature is replaced.
        advance: called with the name of the run that has ended.
        log: earlier runs, which are not repeated; new runs are added.
        turns: tokens after which the next contender goes on with its reply; None: whole replies.
            Each contender is then an `OurContender` with an engine of its own.
    """
    trials: list[Trial] = []
    failed: set[str] = set()
    for temperature in temperatures:
        at = replace(params, temperature=temperature)
        for number, (prompt, ids) in enumerate(prompts):
            start = number % len(contenders)
            order = (*contenders[start:], *contenders[:start])
            runs = None if log is None else log.find(prompt.id, temperature)
            known = runs is not None
            if runs is None:
                runs = run_in_turns(order, ids, at, turns) if turns else Runs()
            for contender in order:
                if not (known or turns or contender.name in failed):
                    with suppress(PeerFailed):
                        runs[contender.name] = contender.run(ids, at)
                if contender.name not in runs:
                    failed.add(contender.name)
                advance(f"{prompt.category}: {contender.name}")
            if log is not None and not known:
                log.add(prompt.id, temperature, runs)
            baseline = runs[contenders[0].name].token_ids
            trials += [
                Trial(prompt, name, temperature, runs[name], runs[name].token_ids == baseline)
                for name in (one.name for one in contenders)
                if name in runs
            ]
    return [trial for trial in trials if trial.contender not in failed]


def run_in_turns(
    contenders: Sequence[Contender], prompt_ids: Sequence[int], params: SamplingParams, tokens: int
) -> Runs:
    """One reply of each, ``tokens`` in a turn: slow seconds of the machine are everyone's."""
    running = {one.name: cast(OurContender, one).running(prompt_ids, params) for one in contenders}
    runs = Runs()
    while running:
        for name, reply in [*running.items()]:
            written = 0
            try:
                while written < tokens:
                    written += len(next(reply).token_ids)
            except StopIteration as end:
                runs[name] = end.value
                del running[name]
    return runs


@dataclass(frozen=True)
class Summary:
    """One contender over some prompts.

    Attributes:
        tokens_per_s: median decoding speed.
        speedup: baseline's decoding time over this one's, all prompts together.
        request_speedup: the same with the reading of the prompt in it.
        median_speedup: median over prompts of the decoding speed-up.
        accepted_per_step: draft tokens committed a step.
        committed_per_step: all tokens committed a step.
        draft_ms: in the drafter, a step.
        verify_ms: in the target's forward, a step.
        num_different: prompts whose text differs from the baseline's.
    """

    category: str
    contender: str
    temperature: float
    num_prompts: int
    tokens_per_s: float
    speedup: float
    request_speedup: float
    median_speedup: float
    accepted_per_step: float
    committed_per_step: float
    draft_ms: float
    verify_ms: float
    num_different: int


def summarise(category: str, trials: Sequence[Trial], baseline: Sequence[Trial]) -> Summary:
    """Sum up one contender's trials against the baseline's on the same prompts."""
    ours, theirs = [t.run for t in trials], [t.run for t in baseline]
    steps = sum(run.stats.steps for run in ours if run.stats)
    accepted = sum(run.stats.accepted for run in ours if run.stats)
    committed = sum(run.stats.committed for run in ours if run.stats)
    return Summary(
        category=category,
        contender=trials[0].contender,
        temperature=trials[0].temperature,
        num_prompts=len(trials),
        tokens_per_s=statistics.median(map(_speed, ours)),
        speedup=_total_speed(ours) / _total_speed(theirs),
        request_speedup=_request_speed(ours) / _request_speed(theirs),
        median_speedup=statistics.median(
            _speed(a) / _speed(b) if _speed(b) else 1.0 for a, b in zip(ours, theirs, strict=True)
        ),
        accepted_per_step=accepted / steps if steps else 0.0,
        committed_per_step=committed / steps if steps else 0.0,
        draft_ms=1e3 * sum(run.draft_s for run in ours) / steps if steps else 0.0,
        verify_ms=1e3 * sum(run.verify_s for run in ours) / steps if steps else 0.0,
        num_different=sum(not t.identical for t in trials),
    )


def summaries(trials: Sequence[Trial], baseline: str) -> list[Summary]:
    """By temperature, category and contender, then the mean of the categories ("macro")."""
    found: list[Summary] = []
    for temperature in _distinct(t.temperature for t in trials):
        at = [t for t in trials if t.temperature == temperature]
        for contender in _distinct(t.contender for t in at):
            rows = []
            for category in _distinct(t.prompt.category for t in at):
                group = [t for t in at if t.prompt.category == category]
                rows.append(
                    summarise(
                        category,
                        [t for t in group if t.contender == contender],
                        [t for t in group if t.contender == baseline],
                    )
                )
            found += [*rows, _macro(rows)]
    return found


def _macro(rows: Sequence[Summary]) -> Summary:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(row, name) for row in rows)

    means = ("tokens_per_s", "speedup", "request_speedup", "median_speedup", "accepted_per_step",
             "committed_per_step", "draft_ms", "verify_ms")  # fmt: skip
    values: dict[str, Any] = {name: mean(name) for name in means}
    for name in ("num_prompts", "num_different"):
        values[name] = sum(getattr(row, name) for row in rows)
    return replace(rows[0], category="macro", **values)


_OVERALL = ("contender", "temperature", "num_prompts", "speedup", "tokens_per_s",
            "committed_per_step", "accepted_per_step", "num_different")  # fmt: skip


def overall(rows: Sequence[Summary], peers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A line for each contender and temperature, from `summaries`.

    It holds figures of the mean of the categories; ``worst``, the least speed-up of a category, and
    its ``worst_category``; and ``over_peers``, the speed over the fastest peer's (None: there is
    none).

    Args:
        peers: names of contenders that are others' plain decoding.
    """
    lines = []
    for macro in (row for row in rows if row.category == "macro"):
        same = [r for r in rows if r.temperature == macro.temperature]
        mine = [r for r in same if r.contender == macro.contender and r.category != "macro"]
        worst = min(mine, key=lambda row: row.speedup)
        theirs = [r.tokens_per_s for r in same if r.contender in peers and r.category == "macro"]
        line = {name: getattr(macro, name) for name in _OVERALL}
        line |= {"worst": worst.speedup, "worst_category": worst.category}
        lines.append(line | {"over_peers": macro.tokens_per_s / max(theirs) if theirs else None})
    return lines


_SUMMARY_COLUMNS = {
    "category": "{category} ({num_prompts})",
    "drafter": "{contender}",
    "tok/s": "{tokens_per_s:.1f}",
    "speed-up": "{speedup:.2f}x",
    "median": "{median_speedup:.2f}x",
    "request": "{request_speedup:.2f}x",
    "accepted/step": "{accepted_per_step:.2f}",
    "committed/step": "{committed_per_step:.2f}",
    "draft ms": "{draft_ms:.2f}",
    "verify ms": "{verify_ms:.2f}",
    "different": "{num_different:d}",
}
_OVERALL_COLUMNS = {
    "drafter": "{contender}",
    "temperature": "{temperature:g}",
    "tok/s": "{tokens_per_s:.1f}",
    "speed-up": "{speedup:.2f}x",
    "95 % of": "{low:.2f}-{high:.2f}x",
    "worst": "{worst:.2f}x ({worst_category})",
    "committed/step": "{committed_per_step:.2f}",
    "over peers": "{over_peers:.2f}x",
}


def comparison_report(
    llm: LLM,
    trials: Sequence[Trial],
    seed: int,
    peers: Sequence[str] = (),
    failures: Mapping[str, str] | None = None,
) -> Report:
    """Trials as tables: by category, and all categories together.

    Args:
        peers: names of contenders that are others' plain decoding.
        failures: contenders without figures, each with the reason.
    """
    rows = summaries(trials, "none")
    plan, failures = llm.plan, failures or {}
    assert plan is not None
    by_temperature = [
        Table("", [vars(r) for r in rows if r.temperature == t], _SUMMARY_COLUMNS,
              f"temperature {t:g}")
        for t in _distinct(row.temperature for row in rows)
    ]  # fmt: skip
    records = [_as_dict(trial) for trial in trials]
    lines = with_intervals(overall(rows, peers), records)
    model = {"name": plan.name, "dtype": plan.dtype, "weights": plan.weights,
             "kernels": plan.decoder}  # fmt: skip
    return Report(
        tables=[
            *by_temperature,
            Table("overall", lines, _OVERALL_COLUMNS, "all categories, each with the same weight"),
            Table("summaries", [vars(row) for row in rows]),
            Table("trials", records),
        ],
        facts={"model": model} | ({"failures": dict(failures)} if failures else {}),
        lines=[f"{name}: {failure}" for name, failure in failures.items()],
        seed=seed,
    )


def _as_dict(trial: Trial) -> dict[str, Any]:
    run = trial.run
    return {
        "prompt": trial.prompt.id,
        "category": trial.prompt.category,
        "contender": trial.contender,
        "temperature": trial.temperature,
        "identical": trial.identical,
        "num_tokens": len(run.token_ids),
        "num_first": run.num_first,
        "first_s": run.first_s,
        "total_s": run.total_s,
        "draft_s": run.draft_s,
        "verify_s": run.verify_s,
        "stats": vars(run.stats) if run.stats else None,
    }


def _speed(run: ContenderRun) -> float:
    return run.num_decoded / run.decode_s if run.num_decoded and run.decode_s > 0 else 0.0


def _total_speed(runs: Sequence[ContenderRun]) -> float:
    return sum(run.num_decoded for run in runs) / max(1e-9, sum(run.decode_s for run in runs))


def _request_speed(runs: Sequence[ContenderRun]) -> float:
    return sum(len(run.token_ids) for run in runs) / max(1e-9, sum(run.total_s for run in runs))


def _distinct(values: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(values))
