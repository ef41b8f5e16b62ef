"""Encoder-decoders: the prompt is the source, which is read once, and drafts change no text."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.core.errors import CapabilityError, ConfigError, PromptError
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters import build_drafter, drafter_spec
from foredraft.drafters.spec import DrafterContext
from foredraft.llm import LLM
from foredraft.load import LoadedModel
from foredraft.models.base import ScoreRow, Source, Target
from foredraft.models.hf.encoder_decoder import EncoderDecoderTarget
from foredraft.models.hf.sizes import NO_LIMIT
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.conformance.harness import Letters
from tests.engine.helpers import drain, new_engine
from tests.exactness.engine_runs import generate as enumerable
from tests.exactness.ledger import Ledger, keyed_numbers_from, law, total_variation
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer
from tests.models.encoder_decoders import (
    CONFIGS,
    DRAFTERS,
    END,
    START,
    SourceTable,
    new_target,
    tiny,
)

SOURCE = (11, 12, 13, 14, 15, 16, 17, 18, 19, END)
SOURCES = (SOURCE, (20, 21, 20, 21, 20, 21, END), (30, END))
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=24)


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest) -> EncoderDecoderTarget:
    return new_target(request.param)


@pytest.fixture(scope="module")
def t5() -> EncoderDecoderTarget:
    return new_target()


def plain(model: Any, source: Sequence[int], text: Sequence[int]) -> Tensor:
    """Logits behind each token of a text, by transformers in one forward."""
    with torch.no_grad():
        ids = torch.tensor([list(source)])
        return model(input_ids=ids, decoder_input_ids=torch.tensor([list(text)])).logits[0]


def llm_of(target: Target, drafter: str, draft: Target | None = None, **options: Any) -> LLM:
    load = LoadOptions(drafter=drafter, num_draft_tokens=4, max_batch_size=4, **options)
    return LLM(target, None, load, draft=None if draft is None else LoadedModel(draft))


@contextmanager
def encoder_runs(model: Any) -> Iterator[list[int]]:
    """The lengths of the sources that the encoder reads meanwhile."""
    seen: list[int] = []
    hook = model.get_encoder().register_forward_hook(
        lambda module, args, kwargs, output: seen.append(output[0].shape[1]), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


# ------------------------------------------------------------------------------------- forwards


def test_tokens_read_in_any_pieces_get_the_logits_of_transformers(
    target: EncoderDecoderTarget,
) -> None:
    text, source = [START, 40, 41, 42, 43, 44, 45], Source(SOURCE)
    wanted_TV = plain(target.model, SOURCE, text)
    slot = target.cache.allocate()
    first = target.score([ScoreRow(slot, text[:2], source=source)])[0].logits_NV
    target.cache.keep(slot, 2, ())
    wrong = TokenTree.chain((42, 99, 98))
    rejected = target.score([ScoreRow(slot, text[2:3], wrong, source=source)])[0].logits_NV
    target.cache.keep(slot, 1, (0,))
    last = target.score([ScoreRow(slot, text[4:5], TokenTree.chain(text[5:]), source=source)])
    got_TV = torch.cat([first, rejected[:2], last[0].logits_NV])
    assert torch.allclose(got_TV, wanted_TV[1:], atol=1e-4)
    target.cache.free(slot)


def test_forks_share_the_source_and_nothing_else(t5: EncoderDecoderTarget) -> None:
    source, cache = Source(SOURCE), t5.cache
    slot = cache.allocate()
    t5.score([ScoreRow(slot, [START, 40], source=source)])
    cache.keep(slot, 2, ())
    with encoder_runs(t5.model) as runs:
        twin = cache.fork(slot)
        a = t5.score([ScoreRow(slot, [41], source=source)])[0].logits_NV
        cache.keep(slot, 1, ())
        b = t5.score([ScoreRow(twin, [50], source=source)])[0].logits_NV
    assert runs == []
    assert torch.allclose(a, plain(t5.model, SOURCE, [START, 40, 41])[-1:], atol=1e-4)
    assert torch.allclose(b, plain(t5.model, SOURCE, [START, 40, 50])[-1:], atol=1e-4)
    cache.free(slot)
    cache.free(twin)


def test_a_forward_that_fails_leaves_nothing_of_a_source_behind(
    t5: EncoderDecoderTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, layer = t5.cache.allocate(), t5.model.decoder.block[1].layer[2]
    with monkeypatch.context() as patched:
        patched.setattr(layer, "forward", lambda *a, **k: (_ for _ in ()).throw(MemoryError("no")))
        with pytest.raises(MemoryError):
            t5.score([ScoreRow(slot, [START], source=Source(SOURCE))])
    assert t5.cache.length(slot) == 0
    got = t5.score([ScoreRow(slot, [START], source=Source(SOURCE))])[0].logits_NV
    assert torch.allclose(got, plain(t5.model, SOURCE, [START]), atol=1e-4)
    t5.cache.free(slot)


# ------------------------------------------------------------------------------------- texts


def reference(model: Any, source: Sequence[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([list(source)])
    out = model.generate(
        ids, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, num_beams=1
    )
    return out[0, 1:].tolist()


def test_greedy_text_is_that_of_transformers(target: EncoderDecoderTarget) -> None:
    results = llm_of(target, "prediction").generate([*SOURCES], replace(GREEDY, max_tokens=12))
    for source, result in zip(SOURCES, results, strict=True):
        ids = torch.tensor([list(source)])
        out = target.model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1)
        assert list(result.token_ids) == out[0, 1:].tolist()
        assert result.num_prompt_tokens == len(source)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_no_text(name: str, params: SamplingParams, t5: Any) -> None:
    takes_model = drafter_spec(name).draft_model == "required"
    draft = new_target(seed=1) if takes_model else None
    wanted = plain_texts(t5, params)
    llm = llm_of(t5, name, draft)
    assert [r.token_ids for r in llm.generate([*SOURCES], params)] == wanted
    assert not llm.policy.num_faults


def plain_texts(target: Target, params: SamplingParams) -> list[tuple[int, ...]]:
    key = str(params)
    if key not in _PLAIN:
        results = llm_of(target, "none").generate([*SOURCES], params)
        _PLAIN[key] = [r.token_ids for r in results]
    return _PLAIN[key]


_PLAIN: dict[str, list[tuple[int, ...]]] = {}


def test_a_draft_model_that_is_the_target_is_right_but_for_the_end(t5: Any) -> None:
    """It has the source, too: without it hardly a guess would be right."""
    (result,) = llm_of(t5, "draft_model", new_target()).generate([SOURCE], GREEDY)
    assert result.stats.accepted >= result.stats.drafted - 4 >= 15


# ------------------------------------------------------------------------- the law, enumerated


@pytest.mark.parametrize(
    ("name", "coupling", "num_tokens"),
    [
        ("none", "seeded", 3),
        ("prediction", "seeded", 3),
        ("suffix", "drawn", 2),
        ("draft_model", "seeded", 2),
        ("draft_model", "drawn", 2),
        pytest.param("suffix", "drawn", 3, marks=pytest.mark.slow),
        pytest.param("draft_model", "seeded", 3, marks=pytest.mark.slow),
        pytest.param("draft_model", "drawn", 3, marks=pytest.mark.slow),
    ],
)
def test_the_law_is_the_target_s(name: str, coupling: Any, num_tokens: int) -> None:
    model, source = tiny(vocab_size=3), (2, 1, 2, 0)
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens, seed=7, coupling=coupling)

    def run(ledger: Ledger) -> tuple[int, ...]:
        target = EncoderDecoderTarget(model)
        draft = EncoderDecoderTarget(tiny(seed=2, vocab_size=3)) if "model" in name else None
        drafter = build_drafter(name, DrafterContext(target, draft, {}))
        with keyed_numbers_from(ledger):
            (result,) = enumerable(target, drafter, 2, [(source, params)])
        return result.token_ids

    wanted: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(3), repeat=num_tokens):
        probs_TV = plain(model, source, (START, *text)).double().softmax(-1)
        wanted[text] = float(torch.stack([probs_TV[i, t] for i, t in enumerate(text)]).prod())
    assert total_variation(law(run), wanted) < 1e-5


# --------------------------------------------------- replies, memory, and who shares the source


def test_the_encoder_runs_once_for_several_replies_and_a_later_request(t5: Any) -> None:
    llm, params = llm_of(t5, "prediction"), replace(SAMPLED, n=3)
    t5.cache.forget()
    with encoder_runs(t5.model) as runs:
        replies = llm.generate([SOURCE], params)
        llm.generate([SOURCE, SOURCES[1]], SAMPLED)
    assert runs == [len(SOURCE), len(SOURCES[1])]
    alone = [llm.generate([SOURCE], replace(SAMPLED, seed=5 + i))[0] for i in range(3)]
    assert [r.token_ids for r in replies] == [r.token_ids for r in alone]


def test_nothing_of_a_source_is_shared_between_tenants(t5: Any) -> None:
    engine = llm_of(t5, "none").engine
    t5.cache.forget()
    with encoder_runs(t5.model) as runs:
        for tenant in ("a", "b", "a"):
            engine.submit(SOURCE, GREEDY, tenant=tenant)
            drain(engine)
    assert len(runs) == 2


def test_other_sources_never_find_each_other_s_text(t5: Any) -> None:
    """Their decoders begin alike, so the tokens alone would be found."""
    texts = plain_texts(t5, GREEDY)
    llm = llm_of(t5, "none")
    for _ in range(2):
        assert [r.token_ids for r in llm.generate([*SOURCES], GREEDY)] == texts


def test_the_text_survives_waiting_for_memory(t5: Any) -> None:
    params = replace(SAMPLED, max_tokens=110)
    wanted = [r.token_ids for r in llm_of(t5, "none").generate([*SOURCES], params)]
    entry_bytes = 2 * 2 * 32 * 4  # keys and values of two layers in float32
    small = new_target(cache_memory=290 * entry_bytes)
    llm = llm_of(small, "prediction")
    results = llm.generate([*SOURCES], params)
    assert [r.token_ids for r in results] == wanted
    assert llm.engine.stats().preemptions > 0
    small.cache.check()


def test_a_source_takes_memory_as_long_as_it_is_kept(t5: Any) -> None:
    target = new_target()
    llm = llm_of(target, "none")
    llm.generate([(11, 12, END)], GREEDY)
    few = target.cache.usage.cached
    llm.generate([(*range(20, 120), END)], GREEDY)
    assert target.cache.usage.cached >= 2 * few + 100
    target.cache.forget()
    assert target.cache.num_bytes == 0
    target.cache.check()


# --------------------------------------------------------------------------- what is refused


def test_what_an_encoder_decoder_has_not_is_refused_by_name(t5: Any) -> None:
    engine = llm_of(t5, "none").engine
    with pytest.raises(ConfigError, match="prompt_logprobs is not offered here"):
        engine.submit(SOURCE, SamplingParams(prompt_logprobs=1))
    with pytest.raises(PromptError, match="the prompt is empty"):
        engine.submit((), GREEDY)
    with pytest.raises(PromptError, match="is not an id below 300"):
        engine.submit((VOCAB_SIZE,), GREEDY)
    bart = llm_of(new_target("bart"), "none").engine
    with pytest.raises(
        PromptError, match=r"129 tokens > 128 maximum \(the encoder reads no more\): shorten it"
    ):
        bart.submit([5] * 129, GREEDY)
    decoder = new_engine(TableModel.random(5, seed=1))
    with pytest.raises(ConfigError, match="source is for encoder-decoders"):
        decoder.submit([1], GREEDY, source=Source((1, 2)))
    with pytest.raises(ConfigError, match="num_beams is not offered"):
        SamplingParams.of(num_beams=4)


def test_a_decoder_needs_to_know_where_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    generation = type(model.generation_config)(eos_token_id=END)
    monkeypatch.setattr(model, "generation_config", generation)
    with pytest.raises(CapabilityError, match="set decoder_start_token_id"):
        EncoderDecoderTarget(model)


@pytest.mark.parametrize("name", ["eagle", "blend", "early_exit", "self_draft"])
def test_drafters_that_stand_on_the_target_s_layers_say_so(name: str, t5: Any) -> None:
    with pytest.raises((CapabilityError, ConfigError), match="needs"):
        llm_of(t5, name)


def test_a_draft_model_with_an_encoder_needs_a_target_with_one(t5: Any) -> None:
    with pytest.raises(CapabilityError, match="has an encoder"):
        llm_of(TableModel.random(VOCAB_SIZE, seed=1), "draft_model", t5)


# ------------------------------------------------------------------------------- model's own rules


def test_forced_and_suppressed_tokens_are_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `generate` of transformers applies them, drafts or not."""
    model = tiny("bart")
    first = reference(model, SOURCE, 6)
    generation = type(model.generation_config)(
        decoder_start_token_id=START,
        forced_bos_token_id=7,
        forced_eos_token_id=9,
        suppress_tokens=[first[2], 8],
        begin_suppress_tokens=[first[0], first[1]],
        eos_token_id=None,
        pad_token_id=START,
    )
    ids = torch.tensor([list(SOURCE)])
    for forced_bos in (None, 7):
        generation.forced_bos_token_id = forced_bos
        monkeypatch.setattr(model, "generation_config", generation)
        target = EncoderDecoderTarget(model)
        num_begun = len(target.decoder_prompt)
        out = model.generate(ids, max_length=12, do_sample=False)
        for drafter in ("none", "prediction", "suffix"):
            params = SamplingParams(max_tokens=12 - num_begun)
            (result,) = llm_of(target, drafter).generate([SOURCE], params)
            assert list(result.token_ids) == out[0, num_begun:].tolist()
            assert result.token_ids[-1] == 9


# --------------------------------------------------------------------------------------- copying

WORDS, WRONG = 40, range(30, 40)
"""A made language of 40 words, of which ten are misspellings of others."""


def corrected(source: Sequence[int]) -> list[int]:
    """Misspellings are replaced; of two of them side by side one is left out, behind 29 one comes
    in."""
    reply: list[int] = []
    for word, following in itertools.pairwise((*source, END)):
        if word in WRONG and following in WRONG:
            continue
        reply += [word - 25] if word in WRONG else [word]
        reply += [28] if word == 29 else []
    return [word for word in reply if word != END] + [END]


def corrector() -> SourceTable:
    """Writes `corrected`, and is nearly sure of it."""

    def conditional(source: tuple[int, ...], text: tuple[int, ...]) -> list[float]:
        wanted = corrected(source)
        following = wanted[min(len(text) - 1, len(wanted) - 1)]
        return [0.9 if i == following else 0.1 / (WORDS - 1) for i in range(WORDS)]

    return SourceTable(WORDS, conditional)


SENTENCES = (
    [2, 3, 4, 35, 6, 7, 8, 9, 10, 11, 12, 31, 32, 13, 14, 15, 16, 17, 18, 19, 20, 21, END],
    [5, 29, 6, 7, 8, 33, 9, 10, 11, 12, 13, 14, 22, 23, 24, 25, 26, 27, 28, 29, 5, 6, END],
)


@pytest.mark.parametrize(
    ("name", "most"),
    [("auto", 0.4), ("prediction", 0.4), ("suffix", 0.6), ("ngram", 0.75)],
)
def test_copying_from_the_source_saves_steps(name: str, most: float) -> None:
    """Aggressive decoding: a correction is read off the source but for what it changes."""
    for source in SENTENCES:
        params = SamplingParams(max_tokens=40, stop_token_ids=[END])
        runs = {}
        for drafter in ("none", name):
            load = LoadOptions(drafter=drafter, num_draft_tokens=8 if drafter == name else None)
            (runs[drafter],) = LLM(corrector(), None, load).generate([source], params)
        assert list(runs["none"].token_ids) == corrected(source)
        assert runs[name].token_ids == runs["none"].token_ids
        assert runs[name].stats.steps <= most * runs["none"].stats.steps


# ------------------------------------------------------------------ from a checkpoint, and served


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("t5")
    tiny().save_pretrained(directory)
    save_tokenizer(directory, None)
    return directory


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LLM:
    return LLM.load(checkpoint)


def test_a_checkpoint_loads_and_says_how_it_runs(loaded: LLM) -> None:
    plan = loaded.plan
    assert plan is not None
    assert (plan.backend, plan.encoder, plan.max_context) == ("hf", True, NO_LIMIT)
    assert plan.cache_bytes_per_token == 2 * 2 * 32 * 4  # of the decoder's two layers
    assert loaded.drafter_name == "prediction"
    texts = ["The ferry crosses the river.", "A draft."]
    results = loaded.generate(texts, GREEDY)
    for text, result in zip(texts, results, strict=True):
        ids = loaded.encode(text)
        assert result.num_prompt_tokens == len(ids)
        (alone,) = llm_of(new_target(), "none").generate([ids], GREEDY)
        assert result.token_ids[:1] == alone.token_ids[:1]
        assert [event.result for event in loaded.stream(text, GREEDY)][-1].text == result.text


def test_defaults_that_are_left_out_are_said(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "generation_config.json"
    said = {"num_beams": 4, "no_repeat_ngram_size": 3, "suppress_tokens": [5]}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    LLM.load(tmp_path)
    assert "names no_repeat_ngram_size, num_beams, which is left out" in caplog.text


def test_the_server_completes_a_source(loaded: LLM) -> None:
    from tests.server.conftest import running

    (result,) = loaded.generate("The ferry.", GREEDY)
    with running(lambda *_: loaded) as server, server.client() as client:
        body = {"prompt": "The ferry.", "max_tokens": 24, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == result.text
        assert answer["usage"]["prompt_tokens"] == result.num_prompt_tokens
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        refused = client.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]["message"]


# ------------------------------------------------------------------------- another vocabulary


def test_a_model_of_another_vocabulary_drafts_behind_the_source(checkpoint: Path) -> None:
    """A decoder-only draft model reads source and reply as one text, in its own tokens."""
    from foredraft.models.text.tokenizer import Tokenizer

    seen: list[tuple[int, ...]] = []

    def conditional(text: tuple[int, ...]) -> list[float]:
        seen.append(text)
        return [1.0 / Letters.vocab_size] * Letters.vocab_size

    codec, target = Tokenizer(checkpoint), new_target()
    draft = LoadedModel(TableModel(Letters.vocab_size, conditional), Letters())
    options = LoadOptions(drafter="cross_tokenizer", num_draft_tokens=3)
    llm = LLM(target, codec, options, draft=draft)
    (result,) = llm.generate("abcabc", SAMPLED)
    (plain_one,) = LLM(target, codec, LoadOptions(drafter="none")).generate("abcabc", SAMPLED)
    assert result.token_ids == plain_one.token_ids
    assert not llm.policy.num_faults
    assert seen
    assert all(text[:6] == (0, 1, 2, 0, 1, 2) for text in seen)
