"""A draft model with another tokenizer: its drafts arrive, and the text stays the target's."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.core.errors import ConfigError, VocabularyMismatchError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NOT_READY
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.model.cross_tokenizer.shared_vocabulary import (
    RestrictedModel,
    SharedVocabulary,
)
from foredraft.drafters.model.cross_tokenizer.transcript import CodecPair
from foredraft.drafters.spec import DrafterContext, TextCodec
from foredraft.models.base import ScoreRow, Target
from foredraft.models.table import TableModel
from tests.conformance.harness import (
    Recorded,
    Setup,
    check_budget,
    check_forgets,
    check_rejections_leave_nothing,
    fused_decoder,
    native_kind,
    plain,
    run,
)
from tests.drafters.tokenizers import END, STYLES, TEXT, Pieces, codec, reciter
from tests.exactness.test_engine_enumeration import DRAWN, SEEDED, assert_exact
from tests.exactness.worlds import World, world

SCRATCH = tempfile.TemporaryDirectory(prefix="foredraft-cross-")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, seed=5)
OTHER_STYLES = [style for style in STYLES if style != "bpe"]


def cross(
    target: Target, model: Target, codecs: tuple[TextCodec, TextCodec], **options: Any
) -> Drafter:
    context = DrafterContext(target, model, options, tokenizer=codecs[0], draft_tokenizer=codecs[1])
    return build_drafter("cross-tokenizer", context)


# ----------------------------------------------------------------------- a draft that is right


@pytest.mark.parametrize("draft", STYLES)
@pytest.mark.parametrize("target", STYLES)
def test_through_text_a_right_draft_is_accepted(target: str, draft: str) -> None:
    """Both models know the text by heart, each in its own tokens."""
    mine, theirs = codec(target), codec(draft)
    tokens = mine.encode(TEXT)
    model = reciter(mine, TEXT)
    drafter = cross(model, reciter(theirs, mine.decode(tokens)), (mine, theirs), mode="slem")
    (result,) = run(model, drafter, [tokens[:4]], GREEDY, 4)
    assert result.token_ids == tuple(tokens[4:64])
    assert result.stats.acceptance_rate > 0.6
    assert result.stats.committed_per_step > 2.5


@pytest.mark.parametrize("draft", ["gpt2", "llama2"])
def test_shared_tokens_of_a_right_draft_are_accepted(draft: str) -> None:
    mine, theirs = codec("bpe"), codec(draft)
    tokens = mine.encode(TEXT)
    model = reciter(mine, TEXT)
    drafter = cross(model, reciter(theirs, TEXT), (mine, theirs), mode="tli")
    (result,) = run(model, drafter, [tokens[:4]], GREEDY, 4)
    assert result.token_ids == tuple(tokens[4:64])
    assert result.stats.accepted > 10


def test_a_tree_of_the_draft_model_becomes_a_tree() -> None:
    mine, theirs = codec("bpe"), codec("gpt2")
    model, sure = reciter(mine, TEXT), reciter(theirs, TEXT)

    def conditional(context: tuple[int, ...]) -> list[float]:
        """Doubts between the right token and the next id."""
        probs = sure.probs(context)
        return [0.6 * prob + 0.4 * probs[i - 1] for i, prob in enumerate(probs)]

    unsure = TableModel(theirs.vocab_size, conditional)
    for mode in ("slem", "tli"):
        drafter = cross(model, unsure, (mine, theirs), mode=mode, shape="best-first")
        recorded = Recorded(drafter)
        (result,) = run(model, recorded, [mine.encode(TEXT)[:4]], GREEDY, 6)
        assert any(not draft.tree.is_chain for _, draft in recorded.drafts)
        assert result.stats.accepted > 10


@pytest.mark.parametrize("mode", ["slem", "tli"])
def test_a_draft_model_without_room_leaves_the_row_unasked(mode: str) -> None:
    mine, theirs = codec("bpe"), codec("gpt2")
    model = reciter(theirs, TEXT)
    model.max_context = 8
    drafter = cross(reciter(mine, TEXT), model, (mine, theirs), mode=mode)
    row = DraftRow.of(0, mine.encode(TEXT)[:9], GREEDY, 4)
    drafter.begin(row)
    assert drafter.propose([row])[0] is NOT_READY


def test_the_end_of_text_can_be_drafted() -> None:
    mine, theirs = codec("bpe"), codec("gpt2")
    text = "The lamp in the harbour" + END
    model = reciter(mine, text)
    drafter = Recorded(cross(model, reciter(theirs, text), (mine, theirs)))
    tokens = mine.encode(text)
    params = replace(GREEDY, max_tokens=40, stop_token_ids=tokens[-1:])
    (result,) = run(model, drafter, [tokens[:5]], params, 30)
    assert result.finish_reason == "stop"
    assert any(tokens[-1] in draft.tree.tokens for _, draft in drafter.drafts)


# ------------------------------------------------------------------------- a draft of any kind


@functools.cache
def native() -> Any:
    return native_kind("eager")


@functools.cache
def random_draft_model(vocab_size: int) -> Any:
    """The weights of a tiny random llama of that vocabulary."""
    from foredraft.models.native.config import read_config
    from foredraft.models.native.weights import load_weights
    from tests.models.checkpoints import NATIVE_CONFIGS, tiny_model

    config = NATIVE_CONFIGS["llama"]()
    config.vocab_size = vocab_size
    directory = Path(SCRATCH.name) / str(vocab_size)
    tiny_model(config, seed=2).save_pretrained(directory)
    read = read_config(directory)
    return read, load_weights(directory, read, torch.float32)


def new_random_draft_model(vocab_size: int) -> Target:
    from foredraft.models.native.target import NativeTarget

    return NativeTarget(*random_draft_model(vocab_size))


PROMPTS = tuple(
    codec("bpe").encode(text)
    for text in ("The lamp", "Crème brûlée costs", "東京の夜, 🦊", "<|im_start|>user\nboats")
)


def set_up(style: str, **options: Any) -> Setup:
    theirs = codec(style)
    target, model = native().new_target(), new_random_draft_model(theirs.vocab_size)
    return Setup(target, cross(target, model, (codec("bpe"), theirs), **options), model)


@functools.cache
def plain_text(params: SamplingParams) -> list[tuple[int, ...]]:
    return plain(native().new_target(), PROMPTS, params)


@pytest.mark.parametrize("mode", ["slem", "tli"])
@pytest.mark.parametrize("style", OTHER_STYLES)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow), 1.0])
def test_the_text_is_the_plain_runs(style: str, mode: str, temperature: float) -> None:
    """Random models babble: broken characters, special tokens and all."""
    params = SamplingParams(temperature=temperature, seed=17, max_tokens=24)
    expected = plain_text(params)
    setup = set_up(style, mode=mode)
    for num_draft_tokens in (1, 4):
        results = run(setup.target, setup.drafter, PROMPTS, params, num_draft_tokens, 3)
        assert [result.token_ids for result in results] == expected
        assert sum(result.stats.drafted for result in results) > 0


@pytest.mark.parametrize("coupling", ["seeded", "drawn"])
@pytest.mark.parametrize(
    ("mode", "shape"), [("slem", "chain"), ("tli", "chain"), ("tli", "best-first")]
)
@pytest.mark.parametrize("style", OTHER_STYLES)
def test_it_keeps_what_the_seam_promises(style: str, mode: str, shape: str, coupling: str) -> None:
    params = SamplingParams(temperature=1.0, seed=17, max_tokens=16, coupling=coupling)  # type: ignore[arg-type]
    options = {"mode": mode, "shape": shape}
    setup = set_up(style, **options)
    check_budget(setup.drafter, setup.target, PROMPTS, params)
    check_forgets(set_up(style, **options), PROMPTS, params, 4)
    check_rejections_leave_nothing(
        lambda: set_up(style, **options).drafter, setup.target, PROMPTS[1], params, 4
    )


# ------------------------------------------------------------------------------- the exact law

TARGET_PIECES = Pieces("a", "b", "c")
DRAFT_PIECES = Pieces("b", "ab", "a", "z")
"""Two tokens are shared, under other numbers; one draft token is two of the target's."""


def drafting(w: World, **options: Any) -> Drafter:
    model = TableModel.random(DRAFT_PIECES.vocab_size, seed=4)
    return cross(w.target(), model, (TARGET_PIECES, DRAFT_PIECES), **options)


@pytest.mark.parametrize("coupling", ["seeded", "drawn"])
@pytest.mark.parametrize(
    ("mode", "shape"), [("slem", "chain"), ("tli", "chain"), ("tli", "best-first")]
)
def test_the_engine_keeps_the_law(mode: str, shape: str, coupling: str) -> None:
    params = DRAWN if coupling == "drawn" else SEEDED
    for kind in ("random", "zeros in p"):
        assert_exact(world(kind, 3), lambda w: drafting(w, mode=mode, shape=shape), params)


def test_shared_tokens_are_drawn_where_drawing_is_asked_for() -> None:
    w = world("random", 3)
    target = w.target()
    for mode, drawn in (("tli", True), ("slem", False)):
        recorded = Recorded(drafting(w, mode=mode))
        run(target, recorded, [(0,)], replace(DRAWN, max_tokens=20), 3)
        proposals = [draft for _, draft in recorded.drafts if len(draft.tree)]
        assert proposals
        assert {draft.is_drawn for draft in proposals} == {drawn}
        for draft in proposals if drawn else ():
            assert draft.draft_probs_NV is not None
            assert draft.draft_probs_NV.shape[1] == 3
            assert not draft.draft_probs_NV[:, 2].any(), "c is not in the draft vocabulary"
            assert draft.draft_probs_NV.sum(1).tolist() == pytest.approx([1.0] * len(draft.tree))


# --------------------------------------------------------------------------- shared vocabulary


def shared(target: TextCodec, draft: TextCodec) -> SharedVocabulary:
    return SharedVocabulary(CodecPair.of(target, draft), target.vocab_size, draft.vocab_size)


@pytest.mark.parametrize("draft", STYLES)
@pytest.mark.parametrize("target", STYLES)
def test_shared_tokens_mean_the_same(target: str, draft: str) -> None:
    mine, theirs = codec(target), codec(draft)
    names = shared(mine, theirs).renaming.names
    assert len(names) > 20
    for ours_id, theirs_id in names.items():
        # Behind a letter: at the start of a text a leading space may be dropped.
        behind = [c.encode("a", add_special_tokens=False) for c in (mine, theirs)]
        here = mine.decode([*behind[0], theirs_id], skip_special_tokens=False)
        there = theirs.decode([*behind[1], ours_id], skip_special_tokens=False)
        assert here == there
    if target == draft:
        for token in mine.encode("The lamp and the boats", add_special_tokens=False):
            assert names[token] == token


def test_vocabularies_without_a_common_token_are_refused() -> None:
    with pytest.raises(VocabularyMismatchError, match="no token in common"):
        shared(Pieces("a", "b"), Pieces("x", "y", "ab"))


def test_a_restricted_model_says_nothing_else() -> None:
    model = TableModel.random(5, seed=1)
    restricted = RestrictedModel(model, torch.tensor([1, 3]))
    row = ScoreRow(restricted.cache.allocate(), (0, 2))
    (scores,) = restricted.score([row])
    (plainly,) = model.score([row])
    assert scores.logits_NV[:, [1, 3]].equal(plainly.logits_NV[:, [1, 3]])
    assert scores.logits_NV.isneginf().sum() == 3


# -------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "slme"}, "did you mean 'slem'"),
        ({"drafter": "ngram"}, "no model of another vocabulary to wrap"),
        ({"drafter": "cross-tokenizer"}, "no model of another vocabulary to wrap"),
        ({"drafter": "draft-mdel"}, "did you mean"),
        ({"shape": "best-frist"}, "did you mean 'best-first'"),
        ({"lookback": 3}, "unknown option"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafting(world("random", 3), **options)


def test_it_needs_both_tokenizers() -> None:
    model = TableModel.random(3, seed=1)
    with pytest.raises(ConfigError, match="needs the tokenizers of both models"):
        build_drafter("cross-tokenizer", DrafterContext(model, TableModel.random(4, seed=1)))


# ----------------------------------------------------------------------------------- real model


@functools.cache
def smollm2() -> tuple[Any, TextCodec]:
    from foredraft.models.files.store import resolve_model
    from foredraft.models.native.target import NativeTarget
    from foredraft.models.text.tokenizer import Tokenizer

    directory = resolve_model("smollm2-135m-instruct")
    target = NativeTarget.load(directory, torch.float32, new_decoder=fused_decoder())
    return target, Tokenizer(directory)


@functools.cache
def smollm2_alone(params: SamplingParams) -> tuple[int, ...]:
    target, mine = smollm2()
    (expected,) = plain(target, [mine.encode(REAL_TEXT)], params)
    return expected


REAL_TEXT = "The list again: apples, pears, plums. The list again: apples,"


@pytest.mark.real_model
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("mode", ["slem", "tli"])
@pytest.mark.parametrize("style", ["gpt2", "llama2"])
def test_smollm2_with_a_draft_of_another_tokenizer(
    style: str, mode: str, temperature: float
) -> None:
    target, mine = smollm2()
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=10)
    model = new_random_draft_model(codec(style).vocab_size)
    drafter = cross(target, model, (mine, codec(style)), mode=mode)
    (result,) = run(target, drafter, [mine.encode(REAL_TEXT)], params, 4)
    assert result.token_ids == smollm2_alone(params)
    assert result.stats.drafted > 0
