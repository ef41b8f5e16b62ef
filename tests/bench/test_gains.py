"""Gains are those of the runs: tokens by time over those of plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.bench.acceptance import (
    ALL,
    Counts,
    acceptance_report,
    figures,
    synthetic_report,
    write_golden,
)
from foredraft.bench.gains import Gain, Gains, choice_of, gains_of, gains_report
from foredraft.bench.load import Served, ServedStep
from foredraft.bench.prompts import built_in_prompts, load_prompts
from foredraft.bench.record import (
    PLAIN,
    Recording,
    Runner,
    Setting,
    Work,
    record,
    recorded_settings,
)
from foredraft.bench.report import write_json
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from foredraft.system.machine import energy_joules
from tests.bench.test_commands import measure


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = TableModel.random(12, 5, order=1, sharpness=5.0)
    return LLM(target, None, LoadOptions(drafter="ngram", max_batch_size=4))


@pytest.fixture(scope="module")
def work(llm: LLM) -> Work:
    prompts = [[(3 * i + j) % 12 for j in range(8)] for i in range(6)]
    return Work(prompts, SamplingParams(max_tokens=40, temperature=0.6, seed=4))


def ran(llm: LLM, work: Work, setting: Setting, load: int = 1) -> Runner:
    runner = Runner(llm, setting)
    runner.begin(work.under(load))
    while runner.turn(60.0):
        pass
    return runner


def timed(recording: Recording, ms: float, node_ms: float = 0.0) -> Recording:
    """The same steps on a machine that takes that long for one, and for a node of it."""
    steps = [replace(step, wall_ms=ms + node_ms * step.drafted) for step in recording.steps]
    return replace(recording, steps=steps)


@pytest.mark.parametrize("load", [1, 3])
def test_a_gain_is_tokens_by_time(llm: LLM, work: Work, load: int) -> None:
    plain, drafted = (
        ran(llm, work, setting, load).recording(len(work.prompts))
        for setting in (Setting(PLAIN), Setting("ngram", 4))
    )
    plain, drafted = timed(plain, 10.0), timed(drafted, 10.0)
    found, bare = Gain.of(drafted, plain), Gain.of(plain, plain)
    assert found.gain == pytest.approx(found.committed)  # drafts are free
    assert found.holds == pytest.approx((found.committed - 1.0) / found.nodes)
    assert (found.step_ms, found.break_even) == (10.0, 0.0)
    assert found.low <= found.gain <= found.high
    assert found.gain_on(range(6)) == pytest.approx(found.gain, rel=0.02)
    assert (bare.gain, bare.nodes, bare.break_even) == (1.0, 0.0, None)
    assert bare.tokens_per_s == pytest.approx(100.0 * load)
    dear = Gain.of(timed(drafted, 10.0, 9.0), plain)
    assert dear.gain < found.gain / 2
    assert dear.break_even == pytest.approx(9.0 * load / 10.0, rel=0.01)


def test_bands_are_those_of_prompts(llm: LLM, work: Work) -> None:
    plain, drafted = (
        timed(ran(llm, work, setting).recording(len(work.prompts)), 10.0)
        for setting in (Setting(PLAIN), Setting("ngram", 4))
    )
    unlike = Gain.of(drafted, plain)
    steps = [replace(step, wall_ms=10.0 * step.committed) for step in drafted.steps]
    alike = Gain.of(replace(drafted, steps=steps), plain)
    assert unlike.high - unlike.low > 0.05
    assert alike.high - alike.low < unlike.high - unlike.low


def test_batches_are_full_until_the_last_prompt_has_been_answered(llm: LLM, work: Work) -> None:
    runner = ran(llm, work, Setting("ngram", 4), load=4)
    steps = runner.served.steps
    assert all(step.num_rows == 4 for step in steps if step.is_decoding)
    finished = sorted(each.number for each in runner.served.finished)
    assert finished == [*range(len(work.prompts))]
    assert llm.engine.num_live == 0, "what was under way behind them is dropped"


def test_interrupted_steps_do_not_count(llm: LLM, work: Work) -> None:
    recording = timed(ran(llm, work, Setting(PLAIN)).recording(len(work.prompts)), 10.0)
    steps = [*recording.steps]
    for number in (20, 60, 100):
        steps[number] = replace(steps[number], wall_ms=500.0)
    found = Gain.of(replace(recording, steps=steps), recording)
    assert found.gain == pytest.approx(1.0, abs=0.01)


def test_recordings_hold_every_request_under_every_load(llm: LLM, work: Work) -> None:
    told: list[str] = []
    settings = recorded_settings(llm, [Setting("suffix"), Setting("auto")])
    assert [each.num_draft_tokens for each in settings] == [2, 4, 16, None]
    found = record(llm, settings, work, [1, 3], told.append)
    assert len(told) == 5 * sum(len(work.under(load).prompts) for load in (1, 3))
    for load, (plain, *others) in found.items():
        assert (plain.setting, plain.load) == (Setting(PLAIN), load)
        assert [each.setting.drafter for each in others] == ["suffix"] * 3 + ["auto"]
        assert all([*each.texts] == [*range(6)] for each in (plain, *others) if load == 1)
        assert [each.num_different(plain) for each in others] == [0] * 4
        others[0].texts[0] = (1,)  # type: ignore[index]
        assert others[0].num_different(plain) == 1
    facts = gains_report(gains_of(found), "a table", ["odd", "even"] * 3).as_dict()
    assert [plan["machine"] for plan in facts["plans"]] == ["here"]
    assert facts["num_different"] == 2


def settled(llm: LLM, work: Work, gains: dict[str, float]) -> Gains:
    """A table in which each drafter gains so much."""
    recording = ran(llm, work, Setting(PLAIN)).recording(len(work.prompts))
    base = Gain.of(recording, recording)
    named = {name: replace(recording, setting=Setting(name)) for name in gains}
    return {1: [replace(base, recording=named[name], gain=gain) for name, gain in gains.items()]}


@pytest.mark.parametrize(
    ("gains", "chosen"),
    [
        ({"none": 1.0, "suffix": 1.3, "auto": 1.29}, "--drafter auto"),
        ({"none": 1.0, "suffix": 1.4, "auto": 1.29}, "--drafter suffix"),
        ({"none": 1.0, "self_draft": 0.9}, "--drafter none"),
        ({"none": 1.0, "suffix": 1.015, "auto": 1.0}, "--drafter none"),
    ],
)
def test_auto_is_chosen_unless_something_is_clearly_better(
    llm: LLM, work: Work, gains: dict[str, float], chosen: str
) -> None:
    assert choice_of(settled(llm, work, gains)[1]).recording.setting.flags == chosen


def test_energy_is_shown_where_the_machine_tells_it(llm: LLM, work: Work, tmp_path: Path) -> None:
    assert energy_joules(tmp_path) is None
    for name, micro in (("intel-rapl:0", "1500000\n"), ("intel-rapl:1", "500000\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(micro)
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the first
    assert energy_joules(tmp_path) == 2.0
    step = ServedStep(1.0, 0.0, 1.0, 1, 0, 4, True)
    assert Served(steps=[step], joules=2.0).token_joules == 0.5
    assert Served().token_joules is None
    (gain,) = settled(llm, work, {"none": 1.0})[1]
    for joules in (None, 0.5):
        told = replace(gain, recording=replace(gain.recording, joules=joules))
        columns = gains_report({1: [told]}, "a table", []).tables[0].columns
        assert ("J/token" in columns) == (joules is not None)


SETTING = Setting("ngram", 4)


def test_it_is_one_and_accepted_by_drafts_and_the_mean_is_of_categories() -> None:
    counts = [
        Counts("coding", drafts=10, drafted=40, accepted=20, tokens=30, seconds=1.0),
        Counts("coding", drafts=10, drafted=40, accepted=0, tokens=10, seconds=1.0),
        Counts("writing", drafts=0, drafted=0, accepted=0, tokens=10, seconds=0.5),
    ]
    coding, writing, mean = figures(SETTING, counts)
    assert coding["acceptance_length"] == 2.0
    assert coding["acceptance_rate"] == 0.25
    assert coding["tokens_per_s"] == 20.0
    assert writing["acceptance_length"] == 1.0
    assert mean["category"] == ALL
    assert mean["acceptance_length"] == 1.5
    low, high = mean["interval"]
    assert low == 1.0 < 1.5 < high == 2.0, "prompts are drawn within their category"


def test_a_golden_file_is_that_of_coding(tmp_path: Path) -> None:
    counts = [Counts(kind, 10, 40, 17, 27, 1.0) for kind in ("coding", "writing")]
    rows = [row for n in (1, 2) for row in figures(Setting("ngram", n), counts)]
    write_golden(tmp_path / "g.yaml", "m", rows, "output_len: 4096", thinks=False)
    text = (tmp_path / "g.yaml").read_text()
    assert "# dataset: coding | output_len: 4096" in text
    assert text.endswith("m:\n  thinking_off:\n    1: 2.70\n    2: 2.70\n")
    write_golden(tmp_path / "g.yaml", "m", rows, "", thinks=True)
    assert "  thinking_on:\n" in (tmp_path / "g.yaml").read_text()


SPEED_BENCH = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay"),
    *("stem", "summarization", "writing"),
)


def test_a_matrix_has_a_row_for_each_setting_and_a_column_for_each_category(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        row
        for n in (1, 8)
        for row in figures(
            replace(SETTING, num_draft_tokens=n),
            [
                Counts(kind, drafts=100, drafted=100 * n, accepted=4 * i, tokens=99, seconds=1.0)
                for i, kind in enumerate(reversed(SPEED_BENCH))
            ],
        )
    ]
    report = acceptance_report(rows, {})
    report.show()
    matrix, rates, _ = capsys.readouterr().out.split("\n\n")[0].split("drafts ")[1:]
    head, *lines = matrix.splitlines()
    assert head.split() == [*(kind[:5] for kind in SPEED_BENCH), "mean"]
    found = [f"{1.0 + 0.04 * i:.2f}" for i in range(10, -1, -1)]
    assert [line.split() for line in lines[:2]] == [["ngram", n, *found, "1.20"] for n in "18"]
    assert rates.splitlines()[2].split()[2:4] == ["5%", "4%"], "40 and 36 of 800"
    assert max(map(len, (head, *lines))) <= 80
    assert len(report.as_dict()["acceptance"]) == 24


def test_a_golden_file_of_two_drafters_is_refused_before_they_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.bench.acceptance.converse", None)
    asked = ("--acceptance", "1,2", "--drafters", "ngram,suffix")
    result = measure(checkpoint, *asked, "--golden", str(tmp_path / "g.yaml"))
    assert "a golden file holds one curve" in str(result.exception)
    result = measure(checkpoint, *asked, "--golden", str(tmp_path / "nowhere" / "g.yaml"))
    assert "there is no folder" in str(result.exception)


def test_a_synthetic_length_is_priced_by_the_forwards() -> None:
    report = synthetic_report(3.0, CostModel(((1, 10.0), (3, 10.0), (12, 40.0))), [1, 4], 8)
    [table] = report.tables
    assert [row["drafted"] for row in table.rows] == [*range(2, 9)], "fewer cannot bring three"
    assert table.rows[0]["at1"] == pytest.approx(3.0)
    assert table.rows[0]["at4"] < 1.5


def test_every_turn_is_asked_through_the_command(checkpoint: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "speed.jsonl", tmp_path / "out.json"
    entry = {"category": "coding", "turns": ["the ferry", "the ferry again"]}  # no id
    path.write_text(json.dumps(entry) + "\n")
    assert load_prompts(str(path))[0].turns == ("the ferry", "the ferry again")
    asked = ("--acceptance", "1,3", "--drafters", "ngram", "--prompts", str(path))
    golden = ("--golden", str(tmp_path / "g.yaml"), "--output", str(out))
    result = measure(checkpoint, *asked, *golden)
    assert result.exit_code == 0, result.exception
    rows = json.loads(out.read_text())["acceptance"]
    assert [(row["category"], row["draft_length"]) for row in rows] == [
        *(("coding", 1), (ALL, 1), ("coding", 3), (ALL, 3)),
    ]
    assert all(1.0 <= row["acceptance_length"] <= 1 + row["draft_length"] for row in rows)
    assert "thinking_off" in (tmp_path / "g.yaml").read_text()


def test_a_file_carries_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(str(path), {"figure": 3}, seed=5)
    report = json.loads(path.read_text())
    assert report["figure"] == 3
    assert report["seed"] == 5
    assert {"command", "revision", "date", "machine"} <= set(report)
    assert {"cpu", "gpu", "threads", "versions"} <= set(report["machine"])


def test_the_switch_of_the_kernels_is_part_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_KERNELS", "off")
    monkeypatch.setattr("sys.argv", ["/usr/bin/foredraft", "measure"])
    path = tmp_path / "out.json"
    write_json(str(path), {}, seed=0)
    assert json.loads(path.read_text())["command"] == "FOREDRAFT_KERNELS=off foredraft measure"


def test_any_number_of_built_in_prompts_is_a_fair_mix() -> None:
    assert [p.category for p in load_prompts(None, 3)] == ["chat", "summarise", "edit"]
    assert load_prompts(None, 3) == load_prompts(None)[:3] == list(built_in_prompts()[:3])
    assert len(load_prompts(None)) == 10


def test_a_limit_takes_from_every_category(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"{c}{i}", "category": c, "turns": [f"{c} {i}"]} for c in "ab" for i in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert [p.id for p in load_prompts(str(path), 4)] == ["a0", "b0", "a1", "b1"]
    assert len(load_prompts(str(path), 99)) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts"),
        ('{"id": 1}', "line 1"),
        ("{", "line 1"),
        ('{"id":1,"category":"a","turns":[]}', "line 1"),
        ('{"category":"a","turns":"the ferry"}', "no list of texts"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_prompts(str(path))


def test_many_short_requests_leave_no_step_without_a_prompt(llm: LLM, work: Work) -> None:
    """A request ends in each step, and the next one is read: such steps count then."""
    short = replace(work, params=replace(work.params, max_tokens=2))
    recorded = record(llm, [Setting("ngram", 4)], short, [16], lambda note: None)
    (runs,) = recorded.values()
    assert all(run.steps for run in runs)
    assert gains_of(recorded)[16]
