"""Plans: what they say of steps is arithmetic on what was recorded, and what runs come to."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from foredraft.bench.outlook import Costs, Outlook, best_outlook, most_load, outlook
from foredraft.bench.plan_report import MachinePlan, check, machine_cost, plan_report
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
    recorded_trace,
)
from foredraft.bench.training import LearningCurve, paybacks
from foredraft.cli.main import app
from foredraft.control.acceptance import PositionCounts
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.record import RowStep, StepRecord, StepTimes
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from foredraft.trace.files import Trace
from foredraft.trace.format import Committed, TracedDraft, TracedRow, TracedRun, TracedStep
from foredraft.train.curves import read_curves
from foredraft.train.texts import write_shard
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tests.train.helpers import some_texts

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
    found = Recording("chain", load, drafted)
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
        each.pace = runner.pace(each, FREE_TO_FOUR)
    said = outlook(drafted, load, Costs(FREE_TO_FOUR, plain), 4)
    slow, fast = (runner.tokens_per_s(FREE_TO_FOUR) for runner in runners)
    assert said.gain == pytest.approx(fast / slow, rel=0.02 if load == 1 else 0.2)


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
    quiet = runner.tokens_per_s(FREE_TO_FOUR)
    for number in (20, 60, 100):
        served.steps[number] = replace(served.steps[number], wall_ms=500.0)
    assert runner.tokens_per_s(FREE_TO_FOUR) == pytest.approx(quiet, rel=0.01)
    pace = runner.pace(runner.recording(len(work.prompts)), FREE_TO_FOUR)
    assert pace == pytest.approx(10.0 / 10.0, rel=0.2)


def test_recordings_hold_every_request_under_every_load(llm: LLM, work: Work) -> None:
    told: list[str] = []
    settings = recorded_settings(llm, ["suffix", "auto"])
    assert [each.num_draft_tokens for each in settings] == [2, 4, 16, None]
    found = record(llm, settings, work, [1, 3], told.append)
    assert len(told) == num_requests(work, [1, 3], 5)
    for load, recorded in found.items():
        plain, others = recorded.plain, [each[-1] for each in recorded.drafters]
        assert [len(each) for each in recorded.drafters] == [3, 1]
        assert (plain.drafter, plain.load) == (PLAIN, load)
        assert [each.drafter for each in others] == ["suffix", "auto"]
        num = len(work.under(load).prompts)
        assert all(len(each.replies) >= num for each in (plain, *others))
        tokens, drafted = (
            [sum(len(r.committed) for r in reply) for reply in each.replies[:num]]
            for each in (plain, others[0])
        )
        assert tokens == drafted
    plan = MachinePlan.of("here", found)
    checks = check(llm, [plan.outlooks[3][1]], work, told.append)
    report = plan_report([plan], checks, "a table").as_dict()
    assert [row["measured"] > 0 for row in report["checks"]] == [True]
    json.dumps(report)


def test_what_never_decodes_alone_is_not_compared(
    llm: LLM, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its steps read a prompt: there is nothing to time."""
    two = settled({"suffix": 1.3, "ngram": 1.2}).outlooks[1]
    rates = {Setting(PLAIN): [50.0, 50.0], two[0].setting: [60.0, 60.0], two[1].setting: [0.0, 0.0]}
    monkeypatch.setattr("foredraft.bench.plan_report.measured_rates", lambda *_: rates)
    assert [each.outlook for each in check(llm, two, work, print)] == two[:1]


def settled(gains: dict[str, float]) -> MachinePlan:
    """A plan in which each drafter gains so much."""
    base = outlook(recording([[1]]), 1, Costs(FREE_TO_FOUR), 1)
    found: list[Outlook] = [
        replace(base, setting=Setting(name), gain=gain) for name, gain in gains.items()
    ]
    return MachinePlan("here", {1: found}, {})


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


def test_a_trace_is_planned_from_as_from_prompts() -> None:
    steps = []
    for number, held in enumerate([2, 0, 3, 1]):
        rows = (row(11 + 4 * number, 3, held),)
        times = StepTimes(1.0, 10.0, 0.5, 0.5)
        steps.append(TracedStep(step=number, at_ms=0.0, times=times, num_waiting=0, rows=rows))
    run = TracedRun(foredraft="1", started="now", drafter="suffix")
    plain, drafted = recorded_trace(Trace(run, tuple(steps)))
    assert outlook(plain, 1, Costs(FREE_TO_FOUR), 0).committed == 1.0
    found = outlook(drafted, 1, Costs(FREE_TO_FOUR, plain), 3)
    assert found.committed == 2.5
    assert found.step_ms == pytest.approx(10.0 + 1.0 + 0.5 + 0.5)
    with pytest.raises(ConfigError, match="nothing was drafted"):
        recorded_trace(Trace(run, ()))


def test_another_machine_is_its_step_times(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    figures = [
        {"name": "target", "rows": 1, "tokens": n, "median_ms": 5.0 + n, "min_ms": 4.0 + n}
        for n in (1, 2, 4, 8, 16)
    ]
    other = {"name": "suffix (draft)", "rows": 1, "tokens": 4, "median_ms": 0.1}
    file.write_text(json.dumps({"context": 256, "figures": [*figures, other]}))
    assert machine_cost(file).ms([(4, 0)]) == pytest.approx(9.0, rel=0.01)
    for wrong in ("{}", "no json", json.dumps({"context": 256, "figures": [other]})):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="--machine"):
            machine_cost(file)


# --------------------------------------------------------------------------------- training a head


def learnt(limit: float, slope: float, power: float, noise: float = 0.0) -> LearningCurve:
    """A head that has learnt from 200,000 tokens by a law, 2,000 tokens a second."""
    dice = random.Random(0)
    points = [
        (n, limit - slope * n**-power + dice.gauss(0.0, noise))
        for n in range(10_000, 200_001, 10_000)
    ]
    return LearningCurve("eagle", np.array(points), 3, 2_000.0)


def test_a_curve_goes_on_as_it_went() -> None:
    true = 2.6 - 25.0 * 4e6**-0.3
    told, low, high = learnt(2.6, 25.0, 0.3).after(4e6)
    assert told == pytest.approx(true, abs=0.02)
    assert high - low < 0.05
    told, low, high = learnt(2.6, 25.0, 0.3, noise=0.01).after(4e6)
    assert low <= true <= high
    assert 0.02 < high - low < 1.5
    flat = learnt(1.8, 0.0, 0.3, noise=0.01)
    assert flat.after(4e6)[0] == pytest.approx(1.8, abs=0.05)
    assert flat.after(4e6)[0] >= flat.committed  # the best that was kept
    assert learnt(9.0, 60.0, 0.2).after(1e9)[0] == 4.0  # a chain of three


def test_training_is_paid_back_after_the_tokens_whose_time_it_saves() -> None:
    base = outlook(recording([[2, 1, 1, 2, 0]] * 3), 1, Costs(FREE_TO_FOUR), 3)
    curve = learnt(2.6, 25.0, 0.3)
    choice = replace(base, setting=Setting("auto"), gain=1.1 * base.gain)
    hour, day = paybacks(curve, base, choice, [1.0, 24.0])
    assert day.gain > hour.gain > hour.now == base.gain
    plain_ms = base.gain * base.step_ms / base.committed
    saved_ms = plain_ms / choice.gain - plain_ms / hour.gain
    assert hour.tokens is not None
    assert hour.tokens * saved_ms == pytest.approx(3.6e6)
    assert "paid back after" in hour.said(None)
    assert f"{hour.tokens / 1e6:.1f} days" in hour.said(1e6)
    (never,) = paybacks(curve, base, replace(choice, gain=4.0), [1.0])
    assert never.tokens is None
    assert "never paid back: --drafter auto" in never.said(1e6)


@pytest.mark.parametrize(
    ("anchors", "temperature", "committed"),
    [((3, 3), 0.0, 1.5), ((3, 3), 1.0, 1.2), ((0, 3), 0.0, 1.2), ((3, 0), 1.0, 1.5)],
)
def test_a_curve_is_of_replies_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
    anchors: tuple[int, int],
    temperature: float,
    committed: float,
) -> None:
    """Tokens a step of no replies at all are 1.00 for ever."""
    found = {"num_anchors": anchors, "greedy": [0.5, 0.4], "committed_greedy": 1.5,
             "committed_sampled": 1.2}  # fmt: skip
    evaluations = [found | {"tokens": n, "seconds": n / 1e3} for n in range(1_000, 6_000, 1_000)]
    head = SimpleNamespace(kind="eagle", evaluations=evaluations)
    monkeypatch.setattr("foredraft.bench.training.read_compared", lambda folder: [head])
    assert LearningCurve.of(Path("any"), temperature).committed == committed


def test_the_command_tells_when_training_is_paid_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head, file = tmp_path / "tiny", tmp_path / "head", tmp_path / "plan.json"
    save_checkpoint(model, NATIVE_CONFIGS["llama-tied"]())
    write_shard(tmp_path / "texts", some_texts())
    training = ("hidden_head", "--target", str(model), "--data", str(tmp_path / "texts"))
    small = ("--batch-tokens", "512", "--sequence", "64", "--depth", "2", "--output-rows", "64")
    with monkeypatch.context() as patched:
        patched.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))  # of what is captured
        asked = ("train", *training, *small, "--tokens", "1k", "--out", str(head))
        assert CliRunner().invoke(app, asked).exit_code == 0
    common = ("plan", "--model", str(model), "--dtype", "float32", "--max-tokens", "12")
    few = ("--limit", "2", "--loads", "1", "--drafters", "ngram")
    options = (*common, *few, "--head", str(head), "--json", str(file))
    assert isinstance(CliRunner().invoke(app, options).exception, ConfigError)  # too few points
    (line, *_) = [line for line in read_curves(curves_of(head)) if "score" in line]
    lines = [
        json.dumps(line | {"tokens": n, "seconds": n / 1e3, "committed_greedy": 2.0 - n**-0.3})
        for n in range(1_000, 8_000, 1_000)
    ]
    curves_of(head).write_text("\n".join(lines))
    result = CliRunner().invoke(app, [*options, "--train-hours", "1,8"])
    assert result.exit_code == 0, result.exception
    found = json.loads(file.read_text())
    assert [each["hours"] for each in found["training"]] == [1.0, 8.0]
    assert f"head={head}" in {row["flags"].split()[-3] for row in found["plans"][0]["outlooks"][2:]}
    assert "h more of training hidden_head" in result.stdout


def curves_of(head: Path) -> Path:
    return head / "training" / "curves.jsonl"


# ------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--drafters", "sufix"), "suffix"),
        (("--loads", "0"), "counts start at 1"),
        (("--machine", "/no/such/file.json"), "/no/such/file.json"),
        (("--json", "/no/such/place/plan.json"), "no folder"),
        (("--from-trace", "run.jsonl", "--check"), "holds no prompts"),
        (("--head", "/no/such/head"), "head.json"),
        (("--tokens-per-day", "many"), "no number"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(options: tuple[str, ...], says: str) -> None:
    error = CliRunner().invoke(app, ["plan", *options]).exception
    assert isinstance(error, ConfigError)
    assert says in str(error)


def test_the_command_prints_a_table_what_to_run_and_what_came_true(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    directory, file = tmp_path_factory.mktemp("plan") / "tiny", tmp_path / "plan.json"
    save_checkpoint(directory, NATIVE_CONFIGS["llama-tied"]())
    options = ("--model", str(directory), "--dtype", "float32", "--max-tokens", "12")
    asked = ("--loads", "1,2", "--limit", "2", "--drafters", "auto,ngram", "--check")
    result = CliRunner().invoke(app, ["plan", *options, *asked, "--json", str(file)])
    assert result.exit_code == 0, result.exception
    assert "2 at once: " in result.stdout
    assert "--drafter" in result.stdout
    found = json.loads(file.read_text())
    (plan,) = found["plans"]
    assert len(plan["outlooks"]) == 2 * 3
    assert {*plan["choices"]} == {"1", "2"}
