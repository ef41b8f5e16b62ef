"""Figures of a comparison, from runs with known times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.compare import overall, run_trials, summaries
from benchmarks.contenders import ContenderRun
from benchmarks.trial_log import TrialLog
from foredraft.bench.prompts import BenchPrompt
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.record import SpeculationStats

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


def test_one_line_a_contender() -> None:
    text = tuple(range(10))
    contenders = [Fixed(name, s, text, []) for name, s in (("none", 2.0), ("fast", 1.0))]
    peer = Fixed("peer", 3.0, text, [])
    trials = run_trials([*contenders, peer], PROMPTS, SamplingParams(), [0.0], lambda text: None)
    lines = {line["contender"]: line for line in overall(summaries(trials, "none"), ["peer"])}
    assert lines["fast"]["speedup"] == lines["fast"]["worst"] == pytest.approx(2.0)
    assert lines["fast"]["worst_category"] in ("a", "b")
    assert lines["fast"]["over_peers"] == pytest.approx(3.0)
    assert lines["fast"]["num_prompts"] == 4


def test_a_comparison_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path, compared = tmp_path / "runs.jsonl", {"contenders": ["none", "x"]}
    order: list[str] = []

    def run(num: int) -> None:
        contenders = [Fixed(name, 1.0, (1, 2), order) for name in ("none", "x")]
        log = TrialLog(path, compared)
        trials = run_trials(
            contenders, PROMPTS[:num], SamplingParams(), [0.0], lambda text: None, log
        )
        assert [t.run.token_ids for t in trials] == [(1, 2)] * 2 * num
        assert all(t.run.stats and t.run.stats.accepted == 4 for t in trials)

    run(2)
    path.write_text(path.read_text() + '{"prompt": "2", "tempe')  # killed while it wrote
    run(4)
    assert order == ["none", "x", "x", "none", "none", "x", "x", "none"]
    assert len(TrialLog(path, compared)) == 4
    with pytest.raises(ConfigError, match="contenders differ"):
        TrialLog(path, {"contenders": ["none", "y"]})
