"""Figures of a comparison, from runs with known times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foredraft.bench.compare import run_trials, summaries
from foredraft.bench.contenders import ContenderRun
from foredraft.bench.prompts import BenchPrompt
from foredraft.core.params import SamplingParams
from foredraft.core.request import SpeculationStats

PROMPTS = [(BenchPrompt(str(i), "ab"[i % 2], "text"), [i]) for i in range(4)]


class Fixed:
    """A contender that needs the same time for every prompt."""

    def __init__(
        self, name: str, decode_s: float, tokens: tuple[int, ...], order: list[str]
    ) -> None:
        self.name, self._decode_s, self._tokens, self._order = name, decode_s, tokens, order

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        self._order.append(self.name)
        stats = SpeculationStats(steps=5, drafted=8, accepted=4, rejected=4, committed=10)
        return ContenderRun(self._tokens, 1.0, 1.0 + self._decode_s, 1, stats, 0.05, 0.5)


def test_speedups_and_differences() -> None:
    text = tuple(range(10))
    order: list[str] = []
    contenders = [
        Fixed("none", 2.0, text, order),
        Fixed("fast", 1.0, text, order),
        Fixed("other", 4.0, (9, *text[1:]), order),
    ]
    told: list[str] = []
    trials = run_trials(contenders, PROMPTS, SamplingParams(), [0.0], told.append)
    rows = {(r.category, r.contender): r for r in summaries(trials, "none")}
    assert rows["macro", "fast"].speedup == pytest.approx(2.0)
    assert rows["macro", "fast"].request_speedup == pytest.approx(1.5)
    assert rows["a", "other"].median_speedup == pytest.approx(0.5)
    assert rows["a", "fast"].committed_per_step == 2.0
    assert rows["a", "fast"].draft_ms == pytest.approx(10.0)
    assert [rows["macro", n].num_different for n in ("none", "fast", "other")] == [0, 0, 4]
    assert len(told) == 12


def test_the_order_of_contenders_rotates() -> None:
    order: list[str] = []
    contenders = [Fixed(name, 1.0, (1, 2), order) for name in ("none", "x")]
    run_trials(contenders, PROMPTS[:2], SamplingParams(), [0.0], lambda text: None)
    assert order == ["none", "x", "x", "none"]
