"""`python -m benchmarks …` on a tiny checkpoint: commands run and check what they are given."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.compare import overall, run_trials, summaries
from benchmarks.contenders import ContenderRun
from benchmarks.random_model import Shape
from benchmarks.results import render
from benchmarks.timing import PeerFailed
from benchmarks.trial_log import TrialLog
from foredraft.bench.prompts import BenchPrompt
from foredraft.bench.report import write_json
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.record import SpeculationStats
from foredraft.engine.request import Event
from tests.cli.conftest import Run
from tests.docs.pages import REPO

Report = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(checkpoint: Path) -> Run:
    """Options go behind the subcommand. The output must fit on the page of results."""

    def bench(name: str, *arguments: str) -> Result:
        options = ("--model", str(checkpoint), "--dtype", "float32")
        result = CliRunner().invoke(app, [name, *options, *arguments])
        if result.exit_code == 0 and "--output" in arguments:
            written = Path(arguments[arguments.index("--output") + 1])
            assert f"## {written.stem}" in render(written.parent)
        return result

    return bench


@pytest.fixture
def report(bench: Run, tmp_path: Path) -> Report:
    """The JSON that a successful command writes with --json."""

    def report(name: str, *arguments: str) -> dict[str, Any]:
        path = tmp_path / "out.json"
        result = bench(name, *arguments, "--output", str(path))
        assert result.exit_code == 0, result.exception
        written: dict[str, Any] = json.loads(path.read_text())
        return written

    return report


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one shape that --random-weights knows."""
    tiny = Shape(64, 128, 2, 4, 2, 16, 1000, True)
    monkeypatch.setattr("benchmarks.random_model.shapes", lambda: {"tiny": tiny})


def test_drafters_are_compared_and_written_down(report: Report) -> None:
    written = report(
        "drafters", "--drafters", "ngram,suffix", "--variant", "ngram max-ngram-size=3",
        "--limit", "2", "--max-tokens", "6", "--temperature", "0,1", "--turns", "2",
    )  # fmt: skip
    assert len(written["trials"]) == 2 * 4 * 2
    assert all(trial["identical"] for trial in written["trials"])
    names = {row["contender"] for row in written["summaries"]}
    assert names == {"none", "ngram", "suffix", "ngram max-ngram-size=3"}


@pytest.mark.parametrize(
    ("asked", "rows", "key", "found"),
    [
        ("contexts --drafters suffix --lengths 50,60 --each 1 --max-tokens 4",
         "summaries", "category", {"50 tokens", "60 tokens", "macro"}),
        ("step --isa portable --formats auto,int8 --tokens 1,2 --context 16,32 --rounds 1",
         "figures", "name", {f"portable {f} at {n}" for f in ("auto", "int8") for n in (16, 32)}),
        ("prompts --lengths 8,20 --formats auto,int8 --rounds 2", "figures", "tokens", {8, 20}),
        ("busy --neighbours 0,1 --tokens 16 --rounds 1", "figures", "neighbours", {0, 1}),
        ("serve-sim --concurrency 1,3 --drafter auto,suffix:4,wrong --num 2 --tokens 8",
         "figures", "contender", {"auto", "suffix:4", "wrong", "none"}),
        ("serve-stream --drafter suffix --limit 1 --max-tokens 8 --rounds 1", "rounds", None, None),
        ("quality --dtype bfloat16 --backend native --limit 90", "quality", None, None),
        pytest.param(
            "step --tokens 1,3 --rows 1,2 --context 16 --rounds 2 --against transformers",
            "figures", "name", {"target", "suffix (draft)", "transformers"}, marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) and " " in value else "",
)  # fmt: skip
def test_a_command_runs_and_writes_its_figures(
    report: Report, asked: str, rows: str, key: str | None, found: set[Any] | None
) -> None:
    written = report(*asked.split())[rows]
    assert written
    if key is not None:
        assert {row[key] for row in written} == found


def test_report_shows_or_writes_the_page(tmp_path: Path) -> None:
    write_json(str(tmp_path / "one.json"), {"model": "tiny"}, seed=0)
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    page = tmp_path / "page.md"
    written = CliRunner().invoke(app, ["report", str(tmp_path), "--into", str(page)])
    assert shown.exit_code == written.exit_code == 0
    assert shown.stdout == page.read_text() == render(tmp_path)


class Crashing:
    """A peer whose process ends whatever it is asked."""

    name, failure = "llama.cpp q8_0", "crashed (signal 11)"

    def fits(self, size: object) -> bool:
        return True

    def fail(self, *asked: object) -> None:
        raise PeerFailed(self.failure)

    run = step = fail


@pytest.mark.parametrize(
    "options",
    [
        ("prompts", "--lengths", "8", "--rounds", "1"),
        ("drafters", "--drafters", "none", "--limit", "2", "--max-tokens", "4"),
    ],
    ids=lambda options: options[0],
)
def test_a_peer_that_crashes_costs_its_row(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    opens = {"plain": "open_contender", "drafters": "open_contender", "step": "open_stepper"}
    for module, name in opens.items():
        command = importlib.import_module(f"benchmarks.{module}")
        monkeypatch.setattr(command, name, lambda *_: Crashing())
    path = tmp_path / "out.json"
    result = bench(*options, "--against", "llama.cpp-q8_0", "--output", str(path))
    assert result.exit_code == 0, result.exception
    assert "llama.cpp q8_0" in result.stdout
    assert "crashed (signal 11)" in result.stdout
    assert "crashed (signal 11)" in path.read_text()


def test_drafters_run_on_random_weights(report: Report, tiny_shape: None) -> None:
    written = report(
        "drafters", "--random-weights", "tiny", "--drafters", "lookahead,auto", "--limit", "1",
        "--max-tokens", "6",
    )  # fmt: skip
    assert {t["category"] for t in written["trials"]} == {"random"}


def test_step_times_a_file_of_a_shape(report: Report, tiny_shape: None) -> None:
    options = ("--stored", "q4_0", "--drafter", "none", "--tokens", "1", "--rounds", "1")
    assert "tiny-q4_0.gguf" in report("step", "--random-weights", "tiny", *options)["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quality", "--limit", "1"), "the second token is the first"),
        (("step", "--weights", "bf16"), "exclude each other"),
        (("drafters", "--drafters", "ngrm"), "did you mean 'ngram'"),
        (("drafters", "--against", "transformer"), "did you mean 'transformers'"),
        (("drafters", "--temperature", "warm"), "not numbers with commas"),
        (("step", "--tokens", "0"), "counts start at 1"),
        (("step", "--random-weights", "lama-8b"), "did you mean 'llama-8b'"),
        (("serve-sim", "--peer", "llama-cpp", "--temperature", "1"), "temperature 0"),
    ],
)
def test_bad_values_are_explained(bench: Run, arguments: tuple[str, ...], message: str) -> None:
    result = bench(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_a_draft_model_is_made_by_noise_and_run_with_both_couplings(report: Report) -> None:
    written = report(
        "drafters", "--noisy-draft-model", "0.05", "--variant", "draft-model", "--coupling", "both",
        "--temperature", "1", "--limit", "1", "--max-tokens", "12",
    )  # fmt: skip
    trials = {trial["contender"]: trial for trial in written["trials"]}
    assert set(trials) == {"none", "draft_model", "draft_model (drawn)"}
    assert trials["draft_model"]["identical"]
    stats = trials["draft_model"]["stats"]
    assert 0 < stats["accepted"] < stats["drafted"]


@pytest.mark.slow
def test_a_checkout_beside_itself(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = CliRunner().invoke(
        app,
        ["revisions", str(REPO), str(REPO), "--model", str(checkpoint), "--limit", "2",
         "--max-tokens", "4", "--loads", "2", "--output", str(path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    rows = json.loads(path.read_text())["revisions"]
    assert [row["what"] for row in rows] == [
        f"{drafter}, 2 at once, T={temperature}"
        for temperature in (0, 1)
        for drafter in ("none", "auto")
    ]
    assert all(row["runs"] == 1 and row["different"] == 0 for row in rows)


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


class Slow(Fixed):
    """One that writes a token at a time."""

    def running(
        self, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Generator[Event, None, ContenderRun]:
        for token in self._tokens:
            self._order.append(self.name)
            yield Event(0, (token,), 0, ())
        return self.run(prompt_ids, params)


def test_replies_are_written_in_turns() -> None:
    order: list[str] = []
    contenders = [Slow("none", 2.0, (1, 2, 3), order), Slow("x", 1.0, (1, 2, 3), order)]
    trials = run_trials(
        contenders, PROMPTS[:1], SamplingParams(), [0.0], lambda text: None, turns=2
    )
    assert order == ["none", "none", "x", "x", "none", "none", "x", "x"]
    assert [trial.contender for trial in trials] == ["none", "x"]
    assert summaries(trials, "none")[-1].speedup == pytest.approx(2.0)


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
