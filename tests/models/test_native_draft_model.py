"""A native model in the form that drafts: the same tokens, described once, and rows left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.core.choices import DrawKey, chance_alike
from foredraft.core.tree import TokenTree
from foredraft.drafters import build_drafter
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.model.staged import fitted
from foredraft.drafters.spec import DrafterContext
from foredraft.load import load_models, plan_models
from foredraft.models.base import ScoreRow, Scores, Shortlist
from foredraft.models.native.draft_model import NativeDraftModel, for_drafts
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import rounded
from foredraft.options import LoadOptions
from tests.conformance.harness import checkpoint, fused_decoder, plain, run
from tests.drafters.heads import random_text, tiny_target

KEYS = (None, DrawKey(3, 7, 0.0), DrawKey(3, 7, 1.3))


@pytest.fixture
def target() -> NativeTarget:
    return tiny_target(fused_decoder())


def draft_model(target: NativeTarget, num_rows: int | None = None) -> NativeDraftModel:
    weights = for_drafts(rounded(target.weights, 4), num_rows)
    return NativeDraftModel(target.config, weights, fused_decoder())


def tokens_of(scores: Scores) -> list[int]:
    assert scores.drawn is not None
    return [-1 if law is None else law.drawn for law in scores.drawn]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("num_pending", [1, 3, 20])
@pytest.mark.parametrize("num_guesses", [0, 2])
def test_a_forward_has_the_bits_of_one_in_a_batch(
    target: NativeTarget, key: DrawKey | None, num_pending: int, num_guesses: int
) -> None:
    model, other = draft_model(target), draft_model(target)
    text = random_text(60)
    rows = []
    for each in (model, other):
        slot = each.cache.allocate()
        each.score([ScoreRow(slot, text[:30], wants_logits=False)])
        each.cache.keep(slot, 30, ())
        pending, tree = text[30 : 30 + num_pending], TokenTree.chain(text[50 : 50 + num_guesses])
        row = ScoreRow(slot, pending, tree, draw=key)
        beside = [ScoreRow(each.cache.allocate(), text[:5], tree)] if each is other else []
        rows.append(each.score([row, *beside])[0])
    assert tokens_of(rows[0]) == tokens_of(rows[1])
    assert torch.equal(rows[0].logits_NV, rows[1].logits_NV)
    assert rows[0].row_wanted == rows[1].row_wanted == (range(1 + num_guesses),)


def test_the_screen_changes_no_token(target: NativeTarget) -> None:
    model, whole = draft_model(target), draft_model(target)
    assert model.weights.screen_VE is not None
    whole.weights = replace(whole.weights, screen_VE=None)
    whole = NativeDraftModel(target.config, whole.weights, fused_decoder())
    text = random_text(40)
    row = ScoreRow(0, text[:1], TokenTree.chain(text[1:]), draw=DrawKey(1, 2, 1.0))
    drawn = []
    for each in (model, whole):
        assert each.cache.allocate() == 0
        drawn.append(tokens_of(each.score([row])))
    agreed = [a == b for a, b in zip(*drawn, strict=True)]
    assert sum(agreed) >= 0.9 * len(agreed)


@pytest.mark.parametrize("num_first", [16, 40, 41])
@pytest.mark.parametrize("key", KEYS[1:])
def test_a_shortlist_leaves_out_tokens_and_changes_no_other(
    target: NativeTarget, num_first: int, key: DrawKey
) -> None:
    model, text, others = draft_model(target), random_text(12), (90, 45, 61)
    slot = model.cache.allocate()
    whole, some = (
        model.score([ScoreRow(slot, text[:1], TokenTree.chain(text[1:]), draw=key, shortlist=each)])
        for each in (None, Shortlist(num_first, others))
    )
    assert some.logits_NV.shape == (12, num_first + 3)
    kept = [*range(num_first), *others]
    for ahead, (before, token) in enumerate(zip(tokens_of(whole), tokens_of(some), strict=True)):
        assert token in kept
        if before in kept:
            assert token == before
        exact_V = whole_head(model, text[: ahead + 1])
        at = kept.index(token)
        assert some.logits_NV[ahead, at] == exact_V[token]
        assert torch.equal(some.logits_NV[ahead, num_first:], exact_V[[*others]])
        logits_V = fitted(some.logits_NV[ahead], model.vocab_size, Shortlist(num_first, others))
        assert int(logits_V.isfinite().sum()) == num_first + 3
        assert logits_V[token] == exact_V[token]
        assert some.drawn is not None
        law = some.drawn[ahead]
        assert law is not None
        assert law.chance is not None
        expected = chance_alike(logits_V, key.ahead(ahead))
        assert law.chance == pytest.approx(expected, rel=0.6)  # of 11 sums, not of 16


@pytest.mark.parametrize("key", KEYS[1:])
def test_rows_of_one_forward_have_the_shortlists_that_they_have_alone(
    target: NativeTarget, key: DrawKey
) -> None:
    model, texts = draft_model(target), [random_text(3 + i, seed=i) for i in range(3)]
    lists = [Shortlist(41, (90, 45, 61)), Shortlist(41), Shortlist(41, (95,))]
    trees = [TokenTree.chain(texts[0][1:]), TokenTree((3, 4, 5), (-1, 0, 0)), TokenTree()]

    def rows(which: Sequence[int]) -> list[ScoreRow]:
        pending = [texts[i][:1] if trees[i].tokens else texts[i] for i in which]
        some = zip(which, pending, strict=True)
        return [
            ScoreRow(slots[i], text, trees[i], draw=None if i == 1 else key, shortlist=lists[i])
            for i, text in some
        ]

    slots = [model.cache.allocate() for _ in range(3)]
    together = model.score(rows(range(3)))
    assert together.is_short
    assert together.logits_NV.shape == (8, 41 + 3)
    for i in range(3):
        alone, span = model.score(rows([i])), together.row_wanted[i]
        assert alone.is_short
        for ahead, at in enumerate(span):
            own, here = (
                fitted(scores.logits_NV[n], model.vocab_size, lists[i])
                for scores, n in ((alone, ahead), (together, at))
            )
            assert torch.equal(own, here)
            assert own.isfinite().sum() == 41 + len(lists[i].others)
            laws = alone.drawn, together.drawn
            assert all(laws)
            one, other = laws[0][ahead], laws[1][at]
            assert one.drawn == other.drawn
            assert one.chance == other.chance
    beside = replace(rows([2])[0], shortlist=None)
    whole = model.score([*rows([0, 1]), beside])
    assert not whole.is_short
    assert whole.logits_NV.shape == (8, model.vocab_size)


def whole_head(model: NativeDraftModel, text: Sequence[int]) -> torch.Tensor:
    """Logits behind a text, all of the head itself."""
    weights = replace(model.weights, screen_VE=None)
    whole = NativeDraftModel(model.config, weights, fused_decoder())
    return whole.score([ScoreRow(whole.cache.allocate(), text)]).logits_NV[-1]


@pytest.mark.parametrize("num_rows", [5, 16, 33])
def test_tokens_that_are_not_shared_are_never_drafted(target: NativeTarget, num_rows: int) -> None:
    model, text = draft_model(target, num_rows), random_text(40)
    assert model.vocab_size == num_rows
    slot = model.cache.allocate()
    scores = model.score([ScoreRow(slot, text[:1], TokenTree.chain(text[1:]), draw=KEYS[2])])
    assert scores.logits_NV.shape == (40, num_rows)
    assert max(tokens_of(scores)) < num_rows
    with pytest.raises(IndexError, match="do not fit a vocabulary"):
        model.score([ScoreRow(slot, [target.vocab_size])])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(temperature=0.8, logit_bias={3: 2.0}, seed=4),
        SamplingParams(temperature=0.9, coupling="drawn", seed=4),
    ],
)
def test_its_drafts_leave_the_text_alone(
    target: NativeTarget, params: SamplingParams, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.drafters.model.shortlist._MANY", 1000)
    params = replace(params, max_tokens=30, ignore_eos=True)
    prompts = [random_text(20 + i) for i in range(rows)]
    alone = plain(tiny_target(fused_decoder()), prompts, params)
    context = DrafterContext(target, draft_model(target))
    for options in ({}, {"guesses": False}, {"draft_vocab_size": 50}):
        drafter = build_drafter("draft_model", replace(context, options=options))
        results = run(target, drafter, prompts, params, 4)
        assert all(result.stats.accepted > 0 for result in results)
        if params.coupling == "seeded":
            assert [result.token_ids for result in results] == alone


class Counted(NativeDraftModel):
    num_forwards = 0

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        self.num_forwards += 1
        return super().score(rows, taps)


def test_guesses_save_forwards_and_change_no_draft(target: NativeTarget) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 6
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    counts, drafted = [], []
    for guesses in (True, False):
        model = Counted.of(draft_model(target), None)
        context = DrafterContext(target, model, {"guesses": guesses})
        drafter = build_drafter("draft_model", context)
        assert isinstance(drafter, DraftModelDrafter)
        # Random models doubt each other after one token.
        drafter.traits = replace(drafter.traits, stops=False)
        before = model.num_forwards
        (result,) = run(target, drafter, [prompt], params, 4)
        counts.append((model.num_forwards - before) / result.stats.steps)
        drafted.append(result.token_ids)
    assert drafted[0] == drafted[1]
    assert counts[0] < counts[1]


def options(**more: object) -> LoadOptions:
    path = str(checkpoint(0.0))
    return LoadOptions.of(model=path, draft_model=str(checkpoint(0.01)), device="cpu", **more)


def test_a_draft_model_runs_in_4_bits_unless_it_is_told_otherwise() -> None:
    fused_decoder()
    for asked, (weights, bits) in {
        "int8": ("int8", 16),
        "bf16": ("bfloat16", 16),
        None: ("int4", 8),
    }.items():
        target, draft = plan_models(options(**{"draft_weights": asked} if asked else {}))
        assert draft is not None
        assert (draft.weights, draft.activation_bits) == (weights, bits)
        assert target.weights != "int8"


@pytest.mark.parametrize("num_rows", [12, 20])
def test_models_of_one_tokenizer_may_differ_in_rows_for_no_token(
    tmp_path: Path, num_rows: int
) -> None:
    """As Qwen2.5 of 0.5B and of 7B do: 151,936 and 152,064 rows for 151,665 tokens."""
    from tests.models.checkpoints import NATIVE_CONFIGS, VOCAB_SIZE, save_checkpoint

    both = []
    for name, more in (("target", 0), ("draft", num_rows)):
        config = NATIVE_CONFIGS["llama"]()
        config.vocab_size = VOCAB_SIZE + more
        (tmp_path / name).mkdir()
        save_checkpoint(tmp_path / name, config)
        both.append(str(tmp_path / name))
    for target, draft in (both, both[::-1]):
        llm = LLM.load(target, draft_model=draft, num_draft_tokens=3, calibrate=False)
        for params in (SamplingParams(max_tokens=20), SamplingParams(temperature=1.0, seed=2)):
            params = replace(params, max_tokens=20, ignore_eos=True)
            (result,) = llm.generate("The ferry", params)
            plain_llm = llm.with_drafter(LoadOptions(drafter="none"))
            assert result.token_ids == plain_llm.generate("The ferry", params)[0].token_ids
            assert result.stats.drafted > 0
            assert "draft_model" in result.stats.drafters
        drawn = SamplingParams(temperature=1.0, coupling="drawn", max_tokens=20, ignore_eos=True)
        for shape in ("chain", "best-first"):
            options = {"drafter": "draft_model", "drafter_options": {"shape": shape}}
            view = llm.with_drafter(replace(llm.options, **options))
            assert view.generate("The ferry", drawn)[0].stats.drafted > 0
            assert not view.policy.num_faults


def test_the_pair_is_loaded_for_drafts() -> None:
    fused_decoder()
    target, draft = load_models(options())
    assert draft is not None
    assert isinstance(draft.target, NativeDraftModel)
    assert not isinstance(target.target, NativeDraftModel)
    assert draft.target.vocab_size == target.tokenizer.vocab_size
