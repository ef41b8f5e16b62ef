"""Traces: what they hold is what happened, and what they say of other settings is what happens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Draft, Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.core.verify import recorded, verify
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.engine.request import GenerationResult
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from foredraft.trace.files import Trace, TraceFile, read_trace
from foredraft.trace.format import TracedRun, TracedStep
from foredraft.trace.record import Tracer
from foredraft.trace.texts import TokenTexts
from tests.engine.helpers import engine_of, limited

LETTERS = "abcdefghij"
PROMPT = [0, 1, 2]


class Letters:
    """One letter a token."""

    def token_text(self, token: int) -> str:
        return LETTERS[token]

    def new_decoder(self, before: Sequence[int]):  # type: ignore[no-untyped-def]
        return LETTERS.__getitem__


class Counting(BaseDrafter):
    """Drafts the next letters; beside the first of them the one after it."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._one(row) for row in rows]

    def _one(self, row: DraftRow) -> Proposal:
        last = row.tokens[-1]
        tokens = [(last + 1 + i) % 10 for i in range(row.budget)]
        if row.params.coupling == "drawn":
            builder = Draft(row.choices, replacement=True)  # type: ignore[arg-type]
            node = ROOT
            for token in tokens:
                probs_V = torch.full((10,), 0.05)
                probs_V[token] = 0.55
                drawn = builder.draw(node, probs_V)
                assert drawn is not None
                node = drawn
            return builder.build()
        if len(tokens) < 2:
            return Proposal.chosen(TokenTree.chain(tokens))
        tree = TokenTree((*tokens[:-1], (last + 2) % 10), (*range(-1, len(tokens) - 2), ROOT))
        return Proposal.chosen(tree, tuple(0.5 for _ in tokens), ("copy",) * len(tokens))


def model() -> TableModel:
    def conditional(context: tuple[int, ...]) -> list[float]:
        following = (context[-1] + 1) % 10
        return [0.55 if i == following else 0.05 for i in range(10)]

    return TableModel(10, conditional)


def run(path: Path | None, budget: int = 4, **params: object) -> GenerationResult:
    target = model()
    given = SamplingParams.of(**{"max_tokens": 60, "seed": 5, "temperature": 1.0} | params)

    def go(trace: object) -> GenerationResult:
        engine = engine_of(
            target,
            Counting(),
            FixedBudget(budget),
            new_decoder=Letters().new_decoder,
            trace=trace,
        )
        if trace is not None:
            engine._policy.rule = recorded(verify)
        engine.submit(PROMPT, given)
        *_, last = engine.run()
        assert last.result is not None
        return last.result

    if path is None:
        return go(None)
    with TraceFile(path) as file:
        file.begin(model="table", drafter="counting")
        return go(file.tracer(Letters()))


def traced(path: Path, **params: object) -> tuple[GenerationResult, Trace]:
    return run(path, **params), read_trace(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("coupling", ["seeded", "drawn"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_holds_what_was_committed_and_changes_nothing(
    tmp_path: Path, coupling: str, temperature: float
) -> None:
    params = {"coupling": coupling, "temperature": temperature}
    result, trace = traced(tmp_path / "t.jsonl", **params)
    assert result == run(None, **params)  # type: ignore[arg-type]
    rows = [row for step in trace.steps for row in step.rows]
    assert tuple(c.token for row in rows for c in row.committed) == result.token_ids
    assert "".join(c.text for row in rows for c in row.committed) == result.text
    assert sum(row.num_accepted for row in rows) == result.stats.accepted
    assert sum(len(row.draft.tokens) for row in rows) == result.stats.drafted
    assert rows[-1].finish_reason == "length"


def test_its_numbers_are_those_the_verdict_follows_from(tmp_path: Path) -> None:
    """Of the tokens named, the one taken has the largest sum of log probability and noise."""
    _, trace = traced(tmp_path / "t.jsonl")
    checked = 0
    for step in trace.steps:
        for law in step.rows[0].why.laws:  # type: ignore[union-attr]
            assert sum(c.target_prob for c in law.candidates) <= 1.0 + 1e-6
            if law.taken is None:
                continue
            sums = {c.token: math.log(c.target_prob) + c.noise for c in law.candidates}  # type: ignore[operator]
            assert max(sums, key=sums.__getitem__) == law.taken
            checked += 1
    assert checked > 30


def test_decisions_of_a_ratio_test_are_what_was_accepted(tmp_path: Path) -> None:
    _, trace = traced(tmp_path / "t.jsonl", coupling="drawn")
    rows = [row for step in trace.steps for row in step.rows if row.draft.tokens]
    assert {row.why.rule for row in rows if row.why} == {"block"}
    for row in rows:
        assert row.why is not None
        assert row.draft.draft_probs is not None
        for made in row.why.decisions:
            assert made.accepted == (made.uniform < made.probability)
        accepted = [made.node for made in row.why.decisions if made.accepted]
        assert list(row.path[-1:]) == accepted
        assert row.why.residual


def test_a_residual_names_what_was_drawn_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.trace.why._NUM_RESIDUAL", 1)
    _, trace = traced(tmp_path / "t.jsonl", coupling="drawn")
    rows = [row for step in trace.steps for row in step.rows if row.why and row.why.residual]
    told = [({r.token for r in row.why.residual}, row.committed[-1].token) for row in rows]  # type: ignore[union-attr]
    assert all(drawn in tokens for tokens, drawn in told)
    assert any(len(tokens) == 2 for tokens, _ in told), "it was not always the likeliest"


def test_trees_come_with_target_probabilities_and_authors(tmp_path: Path) -> None:
    _, trace = traced(tmp_path / "t.jsonl")
    draft = trace.steps[1].rows[0].draft
    assert draft.authors == ("copy",) * 4
    assert draft.target_probs == pytest.approx([0.55, 0.55, 0.55, 0.05])
    assert draft.texts == tuple(LETTERS[t] for t in draft.tokens)


def test_without_a_trace_no_evidence_is_kept() -> None:
    seen = []
    target = model()
    engine = engine_of(target, Counting(), FixedBudget(2), trace=seen.append)
    engine.submit(PROMPT, SamplingParams(max_tokens=4))
    for _ in engine.run():
        pass
    assert all(row.verdict.evidence is None for step in seen for row in step.rows if row.verdict)


def test_traces_of_those_who_share_an_engine_never_mix() -> None:
    llm = LLM(model(), None, LoadOptions(drafter="ngram", max_batch_size=8))
    traces: dict[str, list[TracedStep]] = {"ngram": [], "suffix": [], "none": []}
    asked: dict[str, list[int]] = {}
    for number, (name, steps) in enumerate(traces.items()):
        options = replace(llm.options, drafter=name)
        view = llm.with_drafter(options, trace=Tracer(steps.append, None))
        asked[name] = [
            view.engine.submit(PROMPT, SamplingParams(max_tokens=30, seed=n), policy=view.policy)
            for n in (number, 9)
        ]
    results = {e.request_id: e.result for e in llm.engine.run() if e.result is not None}
    for name, steps in traces.items():
        trace = Trace(TracedRun(foredraft="1", started="now", drafter=name), tuple(steps))
        assert [*trace.request_ids] == asked[name]
        for request_id in asked[name]:
            rows = [row for step in steps for row in step.rows if row.request_id == request_id]
            tokens = [each.token for row in rows for each in row.committed]
            assert tokens == [*results[request_id].token_ids]


def test_bad_files_are_told_by_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    _, _ = traced(path)
    lines = path.read_text().splitlines()
    for text, said in (
        ("", "empty"),
        ("nonsense\n", "line 1"),
        ("\n".join([lines[0], lines[1], "{}"]), "line 3"),
        (lines[0].replace('"version":1', '"version":7'), "version 7"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_trace(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is full")
def test_a_full_disk_is_said_of_the_trace() -> None:
    """At once and by name: it was an error without one behind the reply."""
    with (
        TraceFile(Path("/dev/full")) as file,
        pytest.raises(ConfigError, match="the trace /dev/full cannot be written: No space left"),
    ):
        file.begin(model="m", drafter="d", num_draft_tokens=None)


def test_the_command_shows(tmp_path: Path) -> None:
    from foredraft.cli.main import app

    path = tmp_path / "t.jsonl"
    result, _ = traced(path)
    ask = CliRunner().invoke
    shown = ask(app, ["trace", str(path)])
    assert shown.exit_code == 0, shown.output
    assert result.text in shown.output.replace("\n", "")
    run, *steps = path.read_text().splitlines()
    rows = [re.sub(r'"drafter":[^,]*,"why"', '"drafter":"own","why"', step) for step in steps]
    path.write_text("\n".join((run, *rows)))
    assert ", drafter own," in ask(app, ["trace", str(path)]).output, "the row's, if it has one"
    lines = ask(app, ["trace", str(path), "--json"]).output.splitlines()
    assert len(lines) == 1 + len(read_trace(path).steps)
    assert isinstance(ask(app, ["trace", str(path), "--request", "9"]).exception, ConfigError)


def test_requests_that_gave_way_are_shown(tmp_path: Path) -> None:
    from foredraft.cli.main import app

    path = tmp_path / "t.jsonl"
    target = limited(model(), 160)
    with TraceFile(path) as file:
        file.begin(model="table", drafter="none")
        budget = FixedBudget(0)
        engine = engine_of(target, Counting(), budget, trace=file.tracer(Letters()))
        for seed in range(4):
            engine.submit(PROMPT, SamplingParams(max_tokens=120, seed=seed))
        assert [event for event in engine.run() if event.result]
    number = engine.stats().preemptions
    short = [step for step in read_trace(path).steps if step.num_preempted]
    assert sum(step.num_preempted for step in short) == number > 0
    ask = CliRunner().invoke
    said = f"{number} times a request gave its place in the cache away, before step {short[0].step}"
    assert said in ask(app, ["trace", str(path)]).output


def test_cancelled_requests_leave_no_decoders_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record says that they are over."""
    monkeypatch.setattr("foredraft.trace.texts._MAX_DECODERS", 8)
    texts = TokenTexts(Letters())
    for request_id in range(40):
        texts.push(0, request_id % 10)
        texts.push(1000 + request_id, 2)
    assert len(texts._decoders) == 8
    assert 0 in texts._decoders
