"""The audit of our own engine: it finds nothing where there is nothing, and each fault planted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor
from typer.testing import CliRunner

from foredraft import speculation
from foredraft.audit.faults import FAULTS, Fault, planted, taking
from foredraft.audit.options import AuditOptions
from foredraft.audit.own import AuditedReply, OwnAudit
from foredraft.audit.plain import Margins, shortened
from foredraft.audit.report import EXIT_DIFFERENT, EXIT_INCONCLUSIVE, EXIT_SAME, Finding
from foredraft.cli.main import app
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.rules.base import Rules
from foredraft.core.rules.row import RowRules
from foredraft.core.sampling import Law, law_of
from foredraft.core.tree import ROOT
from foredraft.core.verify import recorded
from foredraft.drafters.base import Drafter
from foredraft.drafters.model.self_draft import SelfDrafter
from foredraft.engine import turn
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Scheduler
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.audit.marks import few_now
from tests.exactness.drafting import SHAPES, Chosen, Draft, Drawn, TableDrafter
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint

VOCAB, SHARPNESS = 30, 6.0
SMALL = AuditOptions(texts=4, detect=0.08, time_limit=600.0)


def tables(sharpness: float, seed: int) -> TableModel:
    return TableModel.random(VOCAB, seed, order=2, sharpness=sharpness)


def nearly(sharpness: float, seed: int, agreement: float) -> TableModel:
    """A draft model whose laws lie between the target's and another's."""
    target, other = tables(sharpness, seed), tables(sharpness, seed + 1)

    def conditional(context: tuple[int, ...]) -> list[float]:
        mine, theirs = target._conditional(context), other._conditional(context)
        weights = [a**agreement * b ** (1 - agreement) for a, b in zip(mine, theirs, strict=True)]
        return [weight / sum(weights) for weight in weights]

    return TableModel(VOCAB, conditional)


def new_audit(
    params: SamplingParams,
    draft: Draft | None = None,
    options: AuditOptions = SMALL,
    agreement: float = 0.8,
) -> OwnAudit:
    target = tables(SHARPNESS, 1)
    llm = LLM(target, None, LoadOptions(drafter="ngram", max_batch_size=16, num_draft_tokens=4))
    drafter: Drafter | None = None
    if draft is not None:
        drafter = TableDrafter(nearly(SHARPNESS, 1, agreement), draft)
    return OwnAudit(llm, replace(params, max_tokens=40, seed=3), options, drafter=drafter)


CHAIN = SHAPES["chain of 3"]
SEEDED = SamplingParams(temperature=0.8)
DRAWN = replace(SEEDED, coupling="drawn")
WAYS: dict[str, Any] = {
    "greedy": (SamplingParams(), Chosen(CHAIN), SMALL, 0.85),
    "seeded": (SEEDED, Chosen(CHAIN)),
    "seeded tree": (replace(SEEDED, top_p=0.9), Chosen(SHAPES["unbalanced"])),
    "drawn": (DRAWN, Drawn(CHAIN)),
    "drawn tree": (DRAWN, Drawn(SHAPES["unbalanced"], replacement=False)),
    "drawn at 1, chosen": (replace(DRAWN, temperature=1.0), Chosen(CHAIN)),
}


@pytest.mark.parametrize("name", few_now(WAYS, ["seeded"]))
def test_nothing_is_found_where_there_is_nothing_and_every_planted_fault_is(name: str) -> None:
    report = new_audit(*WAYS[name]).report()
    by_name = {level.name: level for level in report.levels}
    assert report.exit_code == EXIT_SAME, report.sentence
    faults = by_name["planted faults"].figures["faults"]
    assert len(faults) == (6 if name == "greedy" else 8)
    assert all(row["found_by"] for row in faults)
    assert 0.3 < by_name["margins"].figures["acceptance"] < 0.95
    assert f"{len(faults)} of {len(faults)} planted faults were found" in report.sentence
    assert "nothing differs" in report.sentence


@pytest.mark.parametrize("fault", few_now(FAULTS, FAULTS[:3]))
@pytest.mark.parametrize("agreement", [0.45, pytest.param(0.9, marks=pytest.mark.slow)])
def test_each_fault_is_found_with_good_and_bad_drafters(fault: Fault, agreement: float) -> None:
    audit = new_audit(DRAWN, Drawn(CHAIN), agreement=agreement)
    assert audit.plant(fault)["found_by"] is not None


@pytest.mark.parametrize("name", ["seeded", "drawn"])
def test_an_engine_with_a_fault_is_different(name: str, tmp_path: Path) -> None:
    params, draft, *_ = WAYS[name]
    audit = new_audit(params, draft, replace(SMALL, plant_faults=False))
    view = audit.llm.with_drafter

    def faulty(*arguments: object, **options: object) -> LLM:
        llm = view(*arguments, **options)  # type: ignore[arg-type]
        llm.policy.rule = FAULTS[1].rule
        return llm

    audit.llm.with_drafter = faulty  # type: ignore[method-assign, assignment]
    report = audit.report()
    assert report.exit_code == EXIT_DIFFERENT
    assert "DIFFERENT" in report.sentence
    assert "tamper" not in report.sentence
    report.give(str(tmp_path / "audit.json"))
    assert json.loads((tmp_path / "audit.json").read_text())["sentence"] == report.sentence


def test_a_difference_that_only_preemption_makes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "tiny", NATIVE_CONFIGS["llama-tied"]())
    llm = LLM.load(str(tmp_path / "tiny"), drafter="ngram", max_batch_size=16)
    assert OwnAudit(llm, SEEDED).bits().verdict == Finding.SAME_BITS
    preempt, preempted = Scheduler.preempt, []

    def forgets_its_seed(scheduler: Scheduler, request: Request) -> None:
        preempt(scheduler, request)
        request.first_key = request.first_key._replace(seed=request.seed + 1)
        preempted.append(request)

    monkeypatch.setattr(Scheduler, "preempt", forgets_its_seed)
    level = OwnAudit(llm, SEEDED).bits()
    assert preempted
    assert level.verdict == Finding.DIFFERENT
    assert {row["way"] for row in level.evidence} == {"drafted, preempted"}


def test_no_two_texts_of_a_test_are_drawn_with_the_same_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Summed terms must be independent: else a sound engine would seem to differ."""
    audit, seeds, look_at = new_audit(SEEDED, Chosen(CHAIN)), list[int](), OwnAudit.look_at

    def noted(self: OwnAudit, reply: AuditedReply, *rest: Any) -> None:
        seeds.append(reply.result.seed)
        look_at(self, reply, *rest)

    monkeypatch.setattr(OwnAudit, "look_at", noted)
    assert audit.parameters().verdict == Finding.SAME_BITS
    assert len(seeds) == len({*seeds}) > 20
    seeds.clear()
    audit.margins_and_law()
    assert len(seeds) == len({*seeds}) >= 4


def test_a_context_is_evidence_once() -> None:
    """At temperature 0 a seed changes nothing, and the same prompt gives the same reply."""
    margins = Margins(0.0)
    for context in (1, 1, 2):
        margins.add(None, context)
    assert margins.tokens == 2
    prompt = tuple(range(20))
    again = [shortened(prompt, turn) for turn in range(5)]
    assert [len(each) for each in again] == [20, 17, 14, 11, 10]
    assert all(each == prompt[: len(each)] for each in again)


def test_too_little_time_is_inconclusive_and_says_what_is_missing() -> None:
    options = replace(SMALL, time_limit=1e-3, detect=0.001, plant_faults=False)
    report = new_audit(DRAWN, Drawn(CHAIN), options).report()
    assert report.exit_code == EXIT_INCONCLUSIVE
    assert "0.1% was asked for" in report.sentence


def test_an_audit_where_nothing_was_drafted_is_inconclusive() -> None:
    report = new_audit(SEEDED, Chosen(()), replace(SMALL, plant_faults=False)).report()
    assert report.exit_code == EXIT_INCONCLUSIVE
    assert "nothing was drafted" in report.sentence


def test_it_is_said_where_drafts_are_seldom_accepted() -> None:
    """Rules and depths of drafted rows then hardly show: 3 of 6 planted mistakes were missed."""
    small = replace(SMALL, plant_faults=False)
    for agreement, is_said in ((0.0, True), (1.0, False)):
        audit = new_audit(SEEDED, Chosen(CHAIN), replace(small, texts=12), agreement)
        level = audit.margins_and_law()[0]
        assert level.verdict == Finding.SAME_BITS
        assert ("drafted tokens were accepted, and a mistake" in level.said) is is_said


def test_a_drafter_that_drafts_nothing_cannot_be_audited() -> None:
    llm = LLM(tables(1.0, 1), None, LoadOptions(drafter="none"))
    with pytest.raises(ConfigError, match="nothing to audit"):
        OwnAudit(llm, SEEDED)


def test_a_fault_is_taken_away_again() -> None:
    audit = new_audit(SEEDED, Chosen(CHAIN))
    cache, policy = audit.llm.target.cache, audit.llm.policy
    rule = policy.rule
    for fault in FAULTS:
        with planted(fault, policy, cache):
            assert (policy.rule is not rule) or "keep" in vars(cache)
        assert policy.rule is rule
        assert "keep" not in vars(cache)


# ------------------------------------------------ mistakes that the audit does not plant by itself


def top_p_first(rules: RowRules) -> Rules:
    """The rules with the parameter top_p heeded before penalties, not behind them."""

    class Wrong:
        filters_only, scale, bans = False, None, True

        def law(self, logits_V: Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
            kept_V = law_of(logits_V, SamplingParams(temperature=1.0, top_p=rules.params.top_p))
            masked_V = logits_V.masked_fill(kept_V.logits_V == -math.inf, -math.inf)
            late = replace(rules, params=replace(rules.params, top_p=1.0))
            return late.law(masked_V, text, drafted)

    return cast(Rules, Wrong())


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (lambda rules: replace(rules, token_bans=()), "min_tokens"),
        (lambda rules: replace(rules, grammar=None), "grammar"),
        (top_p_first, "top_p, penalties"),
    ],
    ids=["min_tokens", "grammar", "order"],
)
def test_a_rule_that_drafted_rows_do_not_heed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any, found: str
) -> None:
    save_checkpoint(tmp_path / "tiny", NATIVE_CONFIGS["llama-tied"]())
    llm = LLM.load(str(tmp_path / "tiny"), drafter="self_draft", max_batch_size=16)
    assert OwnAudit(llm, SEEDED).parameters().verdict == Finding.SAME_BITS
    law = turn._law

    def faulty(tree: Any, scores: Any, rules: Rules, text: Any, node: int) -> Law:
        wrong = changed(rules) if node != ROOT and isinstance(rules, RowRules) else rules
        return law(tree, scores, wrong, text, node)

    monkeypatch.setattr(turn, "_law", faulty)
    level = OwnAudit(llm, SEEDED).parameters()
    assert level.verdict == Finding.DIFFERENT
    assert found in level.said


def test_a_mistake_at_a_depth_that_few_drafts_have_is_found() -> None:
    audit = new_audit(SEEDED, Chosen(CHAIN), replace(SMALL, plant_faults=False))
    audit.llm.options = replace(audit.llm.options, num_draft_tokens=None)
    audit._drafter = TableDrafter(nearly(SHARPNESS, 1, 0.95), Chosen((ROOT, *range(7))))
    view = audit.llm.with_drafter

    def faulty(*arguments: object, **options: object) -> LLM:
        llm = view(*arguments, **options)  # type: ignore[arg-type]
        llm.policy.rule = recorded(taking(lambda probability, depth: float(depth == 5)))
        return llm

    audit.llm.with_drafter = faulty  # type: ignore[method-assign, assignment]
    assert sorted(audit._depths) == [3, 16]
    assert audit.margins_and_law()[0].verdict == Finding.DIFFERENT


def test_an_audit_of_auto_audits_the_drafter_that_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "tiny", NATIVE_CONFIGS["llama-tied"]())
    monkeypatch.setattr(speculation, "pays_unasked", lambda traits, prices: True)
    llm = LLM.load(str(tmp_path / "tiny"), max_batch_size=16, calibrate=False)
    assert [*llm.policy.drafters] == ["self_draft", "suffix"]

    def audited() -> tuple[str, Finding]:
        audit = OwnAudit(llm, SEEDED.of_length(40), replace(SMALL, texts=2))
        monkeypatch.setattr(audit, "run", lambda: audit.margins_and_law()[:1])
        report = audit.report()
        assert report.subject.endswith(f"with drafter {report.settings['drafter']}")
        return report.settings["drafter"], report.levels[0].verdict

    assert audited() == ("self_draft", Finding.SAME_BITS)

    def overwrites(drafter: SelfDrafter, chains: Any, reads: Any) -> Any:
        """Entries of the copy come one place too early, where those of the target stay."""
        starts = [len(each.row.tokens) - 2 + len(each.tokens) for each in chains]
        return drafter._copy.score(reads, starts)

    monkeypatch.setattr(SelfDrafter, "_score", overwrites)
    assert audited() == ("self_draft", Finding.DIFFERENT)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--drafter", "none"), "nothing to audit"),
        (("--detect", "0"), "detect is 0.0"),
        (("--set", "alpha=0.9"), "alpha is 0.9"),
        (("--set", "texts=0"), "texts is 0"),
        (("--endpoint", "http://x", "--set", "max_requests=1"), "max_requests is 1"),
        (("--plain-endpoint", "http://127.0.0.1:1"), "goes with an endpoint"),
        (("--endpoint", "localhost:8000"), "no address"),
        (("--output", "/no/such/place/audit.json"), "no folder"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(options: tuple[str, ...], says: str) -> None:
    error = CliRunner().invoke(app, ["audit", *options]).exception
    assert isinstance(error, ConfigError)
    assert says in str(error)
