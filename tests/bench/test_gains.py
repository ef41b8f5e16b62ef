"""Gains are those of the runs: tokens by time over those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.bench.gains import Gain, Gains, gains_report
from foredraft.bench.load import Served, ServedStep
from foredraft.bench.record import (
    PLAIN,
    Recording,
    Runner,
    Setting,
    Work,
    num_requests,
    record,
    recorded_settings,
)
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from foredraft.system.machine import energy_joules


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
    assert found.committed == pytest.approx(1.0 + sum(found.rates))
    assert found.holds == pytest.approx((found.committed - 1.0) / found.nodes)
    assert (found.step_ms, found.break_even) == (10.0, 0.0)
    assert found.low <= found.gain <= found.high
    assert found.gain_on(range(6)) == pytest.approx(found.gain, rel=0.02)
    assert (bare.gain, bare.nodes, bare.rates, bare.break_even) == (1.0, 0.0, (), None)
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
    assert len(told) == num_requests(work, [1, 3], 5)
    for load, recorded in found.items():
        plain, others = recorded.plain, [each[-1] for each in recorded.drafters]
        assert [len(each) for each in recorded.drafters] == [3, 1]
        assert (plain.setting, plain.load) == (Setting(PLAIN), load)
        assert [each.setting.drafter for each in others] == ["suffix", "auto"]
        assert all([*each.texts] == [*range(6)] for each in (plain, *others) if load == 1)
        assert [each.num_different(plain) for each in others] == [0, 0]
        others[0].texts[0] = (1,)  # type: ignore[index]
        assert others[0].num_different(plain) == 1
    facts = gains_report(Gains.of(found), "a table", ["odd", "even"] * 3).as_dict()
    assert [plan["machine"] for plan in facts["plans"]] == ["here"]
    assert facts["num_different"] == 2


def settled(llm: LLM, work: Work, gains: dict[str, float]) -> Gains:
    """A table in which each drafter gains so much."""
    recording = ran(llm, work, Setting(PLAIN)).recording(len(work.prompts))
    base = Gain.of(recording, recording)
    found = [replace(base, setting=Setting(name), gain=gain) for name, gain in gains.items()]
    return Gains({1: found}, {}, {})


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
    assert settled(llm, work, gains).choice(1).setting.flags == chosen


def test_energy_is_shown_where_the_machine_tells_it(llm: LLM, work: Work, tmp_path: Path) -> None:
    assert energy_joules(tmp_path) is None
    for name, micro in (("intel-rapl:0", "1500000\n"), ("intel-rapl:1", "500000\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(micro)
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the first
    assert energy_joules(tmp_path) == 2.0
    step = ServedStep(1.0, 0.0, 1.0, 1.0, 1, 0, 4, True)
    assert Served(steps=[step], joules=2.0).token_joules == 0.5
    assert Served().token_joules is None
    gains = settled(llm, work, {"none": 1.0})
    assert "J/token" not in gains.table().columns
    told = replace(gains, by_load={1: [replace(gains.by_load[1][0], joules=0.5)]})
    assert "J/token" in told.table().columns
