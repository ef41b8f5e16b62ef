"""Figures of many requests at once: see `foredraft.bench.load`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from foredraft.bench.load import Load, Served, ServedStep


@dataclass(frozen=True)
class ServingFigure:
    """One contender under one load, all rounds of it together.

    Attributes:
        concurrency: requests in flight.
        tokens_per_s: all tokens over all time, the reading of prompts included.
        speedup: over the baseline.
        decode_tokens_per_s: in steps that read no prompt and whose batch was full.
        median_s, p95_s: from a request's being handed in to its end.
        first_s: to its first token, median.
        committed_per_step: of one row.
        drafted_per_step: of one row.
        step_ms: of full steps that read no prompt, median.
        draft_ms, kernel_ms, python_ms: what it is made of.
        num_different: requests whose text differs from the baseline's.
    """

    concurrency: int
    temperature: float
    contender: str
    tokens_per_s: float
    speedup: float
    decode_tokens_per_s: float
    median_s: float
    p95_s: float
    first_s: float
    committed_per_step: float
    drafted_per_step: float
    step_ms: float
    draft_ms: float
    kernel_ms: float
    python_ms: float
    num_different: int

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def figure(
    name: str, load: Load, rounds: Sequence[Served], base: Sequence[Served]
) -> ServingFigure:
    """Sum up the rounds of one contender beside those of the baseline."""
    finished = [done for served in rounds for done in served.finished]
    texts = {(i, d.number): d.token_ids for i, served in enumerate(base) for d in served.finished}
    ours = [(i, d) for i, served in enumerate(rounds) for d in served.finished]
    steps = [step for served in rounds for step in served.steps if step.is_decoding]
    full = [step for step in steps if step.num_rows == load.concurrency] or steps
    num_rows = max(1, sum(step.num_rows for step in steps))
    return ServingFigure(
        concurrency=load.concurrency,
        temperature=load.params.temperature,
        contender=name,
        tokens_per_s=_speed(rounds),
        speedup=_speed(rounds) / _speed(base),
        decode_tokens_per_s=1e3 * _mean(full, "committed") / (_mean(full, "wall_ms") or 1.0),
        median_s=statistics.median(done.total_s for done in finished),
        p95_s=_quantile([done.total_s for done in finished], 0.95),
        first_s=statistics.median(done.first_s for done in finished),
        committed_per_step=sum(step.committed for step in steps) / num_rows,
        drafted_per_step=sum(step.drafted for step in steps) / num_rows,
        step_ms=_median(full, "wall_ms"),
        draft_ms=_median(full, "draft_ms"),
        kernel_ms=_median(full, "kernel_ms"),
        python_ms=statistics.median(map(_python_ms, full)) if full else 0.0,
        num_different=sum(texts.get((i, d.number)) != d.token_ids for i, d in ours),
    )


def _python_ms(step: ServedStep) -> float:
    """Milliseconds neither in the drafter nor in the target's kernel."""
    return step.wall_ms - step.draft_ms - step.kernel_ms


def _speed(rounds: Sequence[Served]) -> float:
    """Tokens a second."""
    tokens = sum(len(done.token_ids) for served in rounds for done in served.finished)
    return tokens / max(1e-9, sum(served.seconds for served in rounds))


def _mean(steps: Sequence[ServedStep], name: str) -> float:
    return statistics.fmean(getattr(step, name) for step in steps) if steps else 0.0


def _median(steps: Sequence[ServedStep], name: str) -> float:
    return statistics.median(getattr(step, name) for step in steps) if steps else 0.0


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
