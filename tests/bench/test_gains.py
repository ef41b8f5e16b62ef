"""Gains: predictions are arithmetic on recorded steps, and measured where a setting was run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.bench.gains import HERE, MachineGains, gains_report, machine_cost
from foredraft.bench.outlook import (
    Costs,
    Outlook,
    best_outlook,
    measured_outlook,
    most_load,
    outlook,
)
from foredraft.bench.record import (
    PLAIN,
    Recording,
    Runner,
    Setting,
    Work,
    cost_of_steps,
    num_requests,
    record,
    recorded_settings,
)
from foredraft.control.acceptance import PositionCounts
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.record import RowStep, StepRecord, StepTimes
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from foredraft.trace.format import Committed, TracedDraft, TracedRow

FREE_TO_FOUR = CostModel(((1, 10.0), (2, 10.0), (3, 10.0), (4, 10.0), (8, 20.0), (16, 40.0)))
"""Up to four tokens cost what one costs; then each is dear."""


def row(position: int, drafted: int, accepted: int, request: int = 0) -> TracedRow:
    """A step of a chain of ``drafted`` nodes, of which the first ``accepted`` held."""
    committed = tuple(
        Committed(token=1, text="", by="draft" if i < accepted else "correction")
        for i in range(accepted + 1)
    )
    draft = TracedDraft(tokens=(1,) * drafted, parents=tuple(range(-1, drafted - 1)))
    return TracedRow(
        request_id=request,
        position=position,
        num_read=1,
        budget=drafted,
        draft=draft,
        kind="bonus" if accepted == drafted else "correction",
        path=tuple(range(accepted)),
        committed=committed,
        num_accepted=accepted,
        finish_reason=None,
    )


def recording(replies: Sequence[Sequence[int]], drafted: int = 3, load: int = 1) -> Recording:
    """Replies as numbers of accepted tokens, step by step."""
    found = Recording(Setting("ngram", drafted), load)
    for number, accepted in enumerate(replies):
        position, rows = 11, []
        for held in accepted:
            rows.append(row(position, drafted, held, number))
            position += held + 1
        found.replies.append(rows)
        found.prompts.append(number)
        found.prompt_tokens.append(10)
    return found


def test_a_step_is_priced_by_its_nodes_and_what_it_committed() -> None:
    found = outlook(recording([[3, 0, 1], [2, 2]]), 1, Costs(FREE_TO_FOUR), 3)
    assert found.nodes == 3.0
    assert found.committed == (4 + 1 + 2 + 3 + 3) / 5
    assert found.gain == pytest.approx(found.committed)  # four tokens cost what one costs
    assert found.rates == (4 / 5, 3 / 5, 1 / 5)
    assert found.committed == pytest.approx(1.0 + sum(found.rates))
    assert found.token_ms == pytest.approx(10.0 / found.committed, rel=0.05)
    assert found.holds == pytest.approx(8 / 15)
    assert found.break_even == pytest.approx(0.0, abs=0.01)
    assert found.low <= found.gain <= found.high


def test_bands_are_those_of_prompts() -> None:
    alike = outlook(recording([[1, 1]] * 6), 1, Costs(FREE_TO_FOUR), 3)
    assert alike.low == pytest.approx(alike.high)
    unlike = outlook(recording([[3] * 9, [0] * 9] * 3), 1, Costs(FREE_TO_FOUR), 3)
    assert unlike.high - unlike.low > 0.5


def test_fewer_nodes_bring_the_same_text_in_more_steps() -> None:
    found = outlook(recording([[3, 3]]), 1, Costs(FREE_TO_FOUR), 1)
    assert (found.nodes, found.committed) == (1.0, 2.0)


def test_nodes_that_batches_make_dear_are_left_out() -> None:
    often = recording([[3, 0, 2, 0, 1, 0]] * 4)
    alone = best_outlook([often], 1, Costs(FREE_TO_FOUR))
    many = best_outlook([often], 4, Costs(FREE_TO_FOUR))
    assert alone.gain > 1.3
    assert many.gain < 1.0
    assert many.nodes < alone.nodes


def test_few_nodes_are_told_from_what_few_did() -> None:
    """A drafter may take longer for many, and what few take is not in a recording of many."""
    many = recording([[3, 0, 2, 1]] * 3)
    few = replace(recording([[1, 0, 1, 1, 0]] * 3, drafted=1), pace=0.5)
    costs = Costs(FREE_TO_FOUR, recording([[0]]))
    found = best_outlook([few, many], 1, costs)
    assert found.setting.num_draft_tokens == 1
    assert found.gain == outlook(few, 1, costs, 1).gain
    assert best_outlook([replace(few, pace=2.0), many], 1, costs).nodes > 1.0


def test_the_load_at_which_it_stops_paying_is_where_the_cost_says() -> None:
    """Two rows fit four tokens with a node each; with three, tokens are dear."""
    often = recording([[1, 0, 1, 1, 0, 1]] * 4, drafted=1)
    costs = Costs(FREE_TO_FOUR)
    most = most_load([[often]], [costs])
    assert most >= 2
    assert best_outlook([often], most, costs).gain > 1.0
    assert best_outlook([often], most + 1, costs).gain <= 1.0
    assert most_load([[recording([[0, 0]] * 4)]], [costs]) == 0


def test_drafting_forwards_count_by_their_number() -> None:
    slow = replace(recording([[3, 3, 0]] * 3), takes_rounds=True)
    for _ in range(4):
        slow.note(StepTimes(6.0, 10.0, 0.0, 0.0), [(True, 3)])
    slow.rest_ms.append(1.0)
    found = outlook(slow, 1, Costs(FREE_TO_FOUR), 3)
    assert found.step_ms == pytest.approx(10.0 + 3 * 2.0 + 1.0, rel=0.05)
    assert outlook(slow, 1, Costs(FREE_TO_FOUR), 1).step_ms == pytest.approx(13.0, rel=0.05)


def test_costs_follow_the_steps_that_were_run() -> None:
    steps = [
        StepRecord((RowStep(0, 50, num_tokens),), StepTimes(0.0, ms, 0.0, 0.0))
        for num_tokens, ms in [(1, 10.0), (2, 10.5), (8, 20.0), (64, 160.0)]
        for ms in (ms, ms, 9 * ms, ms, 0.9 * ms)
    ]
    cost = cost_of_steps(steps, None)
    assert [round(cost.ms([(n, 0)]), 1) for n in (1, 2, 8, 64)] == [10.0, 10.5, 20.0, 160.0]
    slower = [StepRecord((RowStep(0, 50, 4),), StepTimes(0.0, 50.0, 0.0, 0.0))] * 5
    times = [cost_of_steps([*steps, *slower], None).ms([(n, 0)]) for n in (1, 2, 4, 8, 64)]
    assert times == sorted(times)


# ------------------------------------------------------------------------------------ real engines


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


def test_what_is_said_of_fewer_nodes_is_what_runs_with_fewer_do(llm: LLM, work: Work) -> None:
    """And what the controller's slots come to."""
    prompts = [[(3 * i + j) % 12 for j in range(8)] for i in range(12)]
    work = Work(prompts, replace(work.params, max_tokens=120))
    many = ran(llm, work, Setting("ngram", 8)).recording(12)
    for number in (1, 2, 4, 8):
        runner = ran(llm, work, Setting("ngram", number))
        few, costs = runner.recording(12), Costs(FREE_TO_FOUR)
        said, seen = outlook(many, 1, costs, number), outlook(few, 1, costs, number)
        assert said.committed == pytest.approx(seen.committed, rel=0.06)
        assert said.gain == pytest.approx(seen.gain, rel=0.06)
        slots = PositionCounts(1.0)
        steps: list[StepRecord] = [step for step in runner.records if step.is_decoding]
        for step in steps:
            slots.note(step.rows[0])
        accepted = slots.counts[2].sum() / len(steps)
        assert seen.committed == pytest.approx(1.0 + accepted, rel=0.03)


@pytest.mark.parametrize("load", [1, 3])
def test_what_was_run_comes_out_as_it_was_whatever_the_costs_say(
    llm: LLM, work: Work, load: int
) -> None:
    runners = [ran(llm, work, setting, load) for setting in (Setting(PLAIN), Setting("ngram", 4))]
    plain, drafted = found = [runner.recording(len(work.prompts)) for runner in runners]
    for runner, each in zip(runners, found, strict=True):
        runner.time(each, FREE_TO_FOUR)
    costs = Costs(FREE_TO_FOUR, plain)
    said, measured = outlook(drafted, load, costs, 4), measured_outlook([drafted], load, costs)
    assert measured.gain == pytest.approx(drafted.tokens_per_s / plain.tokens_per_s)
    assert measured.tokens_per_s == pytest.approx(drafted.tokens_per_s)
    assert said.gain == pytest.approx(measured.gain, rel=0.02 if load == 1 else 0.2)
    assert measured.low <= measured.gain <= measured.high
    assert said.gain_on(range(6)) == pytest.approx(said.gain)


def test_batches_are_full_until_the_last_prompt_has_been_answered(llm: LLM, work: Work) -> None:
    runner = ran(llm, work, Setting("ngram", 4), load=4)
    steps = runner.served.steps
    assert all(step.num_rows == 4 for step in steps if step.is_decoding)
    finished = sorted(each.number for each in runner.served.finished)
    assert finished == [*range(len(work.prompts))]
    assert llm.engine.num_live == 0, "what was under way behind them is dropped"


def test_interrupted_steps_do_not_count(llm: LLM, work: Work) -> None:
    runner = ran(llm, work, Setting(PLAIN))
    served = runner.served
    served.steps = [replace(step, wall_ms=10.0, score_ms=9.0) for step in served.steps]
    recording = runner.recording(len(work.prompts))
    runner.time(recording, FREE_TO_FOUR)
    quiet = recording.tokens_per_s
    for number in (20, 60, 100):
        served.steps[number] = replace(served.steps[number], wall_ms=500.0)
    runner.time(recording, FREE_TO_FOUR)
    assert recording.tokens_per_s == pytest.approx(quiet, rel=0.01)
    assert recording.pace == pytest.approx(10.0 / 10.0, rel=0.2)


def test_recordings_hold_every_request_under_every_load(
    llm: LLM, work: Work, tmp_path: Path
) -> None:
    told: list[str] = []
    settings = recorded_settings(llm, [Setting("suffix"), Setting("auto")])
    assert [each.num_draft_tokens for each in settings] == [2, 4, 16, None]
    found, cost = record(llm, settings, work, [1, 3], told.append)
    assert len(told) == num_requests(work, [1, 3], 5)
    for load, recorded in found.items():
        plain, others = recorded.plain, [each[-1] for each in recorded.drafters]
        assert [len(each) for each in recorded.drafters] == [3, 1]
        assert (plain.setting, plain.load) == (Setting(PLAIN), load)
        assert [each.setting.drafter for each in others] == ["suffix", "auto"]
        num = len(work.under(load).prompts)
        assert all(len(each.replies) >= num for each in (plain, *others))
        tokens, drafted = (
            [sum(len(r.committed) for r in reply) for reply in each.replies[:num]]
            for each in (plain, others[0])
        )
        assert tokens == drafted
        assert [each.num_different(plain) for each in others] == [0, 0]
        others[0].texts[0] = (1,)
        assert others[0].num_different(plain) == 1
    gains = [MachineGains.of(HERE, found)]
    gains.append(MachineGains.of("there", {n: each.elsewhere(cost) for n, each in found.items()}))
    report = gains_report(gains, cost, "a table", ["odd", "even"] * 3)
    file = tmp_path / "here.json"
    file.write_text(json.dumps(report.as_dict()))
    written = json.loads(file.read_text())
    assert [plan["machine"] for plan in written["plans"]] == [HERE, "there"]
    assert written["num_different"] == 2
    assert "auto" not in {each["drafter"] for each in written["plans"][1]["outlooks"]}
    assert machine_cost(file).ms([(4, 9)]) == pytest.approx(cost.ms([(4, 9)]), rel=0.05)


def settled(gains: dict[str, float]) -> MachineGains:
    """A table in which each drafter gains so much."""
    base = outlook(recording([[1]]), 1, Costs(FREE_TO_FOUR), 1)
    found: list[Outlook] = [
        replace(base, setting=Setting(name), gain=gain) for name, gain in gains.items()
    ]
    return MachineGains(HERE, {1: found}, {}, {}, {})


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
    gains: dict[str, float], chosen: str
) -> None:
    assert settled(gains).choice(1).setting.flags == chosen


def test_another_machine_is_its_step_times(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    times = {str(n): 5.0 + n for n in (1, 2, 4, 8, 16)}
    forward = {"ms": times, "entry_ms": 0.01, "pair_ms": 0.0}
    file.write_text(json.dumps({"forward": forward}))
    assert machine_cost(file).ms([(4, 100)]) == pytest.approx(10.0, rel=0.01)
    for wrong in ("{}", "no json", json.dumps({"forward": {"ms": times}})):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="--machine"):
            machine_cost(file)
