"""`LLM`: its public methods and their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foredraft.load
from foredraft import LLM, SamplingParams
from foredraft.core.errors import (
    ConfigError,
    PromptError,
)
from foredraft.core.record import StepRecord
from foredraft.drafters.model import self_draft
from foredraft.drafters.model.staged import Fit
from foredraft.load import LoadedModel
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from tests.conformance.harness import checkpoint, is_empty
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
TEXTS = ["The ferry crosses", "A draft is", "Straße 東京"]
MESSAGES = [{"role": "user", "content": "Where is the ferry?"}]


@pytest.fixture(scope="module")
def directory() -> Path:
    return checkpoint(0.0)


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM.load(str(directory), dtype="float32", drafter="ngram")


def plain_llm(**options: Any) -> LLM:
    """An LLM over tables, without weights."""
    target = TableModel.random(VOCAB_SIZE, seed=5)
    tokenizer = options.pop("tokenizer", None)
    return LLM(target, tokenizer, LoadOptions(drafter="none"), **options)


# ------------------------------------------------------------------------------------ what it does


@pytest.mark.parametrize("drafter", ["none", "ngram", "auto", "draft-model", "draft_model"])
def test_every_drafter_gives_the_same_text(llm: LLM, directory: Path, drafter: str) -> None:
    more: dict[str, Any] = {}
    if drafter.startswith("draft"):
        more["draft_model"] = str(checkpoint(0.01))
    other = LLM.load(str(directory), dtype="float32", drafter=drafter, **more)
    expected = [result.text for result in llm.generate(TEXTS, PARAMS)]
    assert [result.text for result in other.generate(TEXTS, PARAMS)] == expected
    assert is_empty(other.target.cache)


def test_auto_takes_the_best_that_is_there(directory: Path) -> None:
    assert LLM.load(directory, drafter="auto").drafter_name == "suffix"
    with_model = LLM.load(directory, draft_model=checkpoint(0.01))
    assert with_model.drafter_name == "draft_model"
    assert with_model.draft_plan is not None


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    many = [TEXTS[i % 3] for i in range(11)]  # more than fit into one batch
    results = llm.generate(many, PARAMS)
    alone = [llm.generate(text, PARAMS)[0].text for text in TEXTS]
    assert [result.text for result in results] == [alone[i % 3] for i in range(11)]


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], PARAMS) == []


def test_one_text_is_a_batch_of_one(llm: LLM) -> None:
    (one,), (same,) = llm.generate(TEXTS[0], PARAMS), llm.generate([TEXTS[0]], PARAMS)
    assert one.token_ids == same.token_ids


@pytest.mark.parametrize(
    "as_prompt", [list, tuple, np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids]]
)
def test_token_ids_of_any_integer_kind_are_a_prompt(
    llm: LLM, as_prompt: Callable[[Sequence[int]], Any]
) -> None:
    ids = [5, 9, 200, 9]
    (expected,) = llm.generate([ids], PARAMS)
    (one,) = llm.generate(as_prompt(ids), PARAMS)
    batch = llm.generate([as_prompt(ids), TEXTS[0]], PARAMS)
    assert one.token_ids == batch[0].token_ids == expected.token_ids
    assert one.num_prompt_tokens == 4


def test_a_stream_is_the_result_in_pieces(llm: LLM) -> None:
    (expected,) = llm.generate(TEXTS[0], PARAMS)
    events = list(llm.stream(TEXTS[0], PARAMS))
    assert "".join(piece.text for event in events for piece in event.pieces) == expected.text
    assert tuple(i for event in events for i in event.token_ids) == expected.token_ids
    assert events[-1].result is not None
    assert events[-1].result.text == expected.text


def test_chat_is_generate_on_the_chat_format(llm: LLM) -> None:
    assert llm.tokenizer is not None
    reply = llm.chat(MESSAGES, PARAMS)
    (same,) = llm.generate([llm.tokenizer.encode_chat(MESSAGES)], PARAMS)
    assert reply.text == same.text
    both = llm.chat([MESSAGES, [*MESSAGES, *MESSAGES[-1:]]], PARAMS)
    assert len(both) == 2
    assert both[0].token_ids == reply.token_ids
    last = list(llm.stream_chat(MESSAGES, PARAMS))[-1]
    assert last.result is not None
    assert last.result.text == reply.text


def test_a_conversation_reads_only_what_is_new(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    score = llm.target.score

    def watched(rows: Any, taps: Any = ()) -> Any:
        read.extend(len(row.pending) for row in rows)
        return score(rows, taps)

    monkeypatch.setattr(llm.target, "score", watched)
    messages = list(MESSAGES)
    for _ in range(2):
        read.clear()
        result = list(llm.stream_chat(messages, PARAMS))[-1].result
        assert result is not None
        first_read = read[0]
        assert result.text == llm.chat(messages, PARAMS).text
        messages += [{"role": "assistant", "content": result.text}, MESSAGES[0]]
    assert result is not None
    assert first_read < result.num_prompt_tokens
    assert is_empty(llm.target.cache)


def test_without_a_tokenizer_it_takes_and_gives_ids() -> None:
    llm = plain_llm()
    (result,) = llm.generate([1, 2, 3], PARAMS)
    assert (len(result.token_ids), result.text) == (12, "")
    with pytest.raises(ConfigError, match="built without a tokenizer; pass token ids"):
        llm.generate("text", PARAMS)
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        llm.generate([1, 2, 3], SamplingParams(stop="."))


def test_a_draft_model_of_ones_own(llm: LLM) -> None:
    target, draft = TableModel.random(20, seed=1), TableModel.random(20, seed=1)
    mine = LLM(target, None, LoadOptions(), draft=LoadedModel(draft))
    assert mine.drafter_name == "draft_model"
    (result,) = mine.generate([[1, 2]], SamplingParams(max_tokens=20))
    assert result.stats.acceptance_rate == 1.0


def test_a_prediction_drafts_for_the_request_that_brings_it(directory: Path) -> None:
    llm = LLM.load(str(directory), dtype="float32", drafter="ngram", calibrate=False)
    (alone,) = llm.generate("The ferry", PARAMS)
    predicted = SamplingParams(max_tokens=12, ignore_eos=True, prediction=alone.text)
    (result,) = llm.generate("The ferry", predicted)
    *_, last = llm.stream("The ferry", predicted)
    assert last.result is not None
    for each in (result, last.result):
        assert each.token_ids == alone.token_ids
        assert "prediction" in each.stats.drafters
    off = llm.with_drafter(LoadOptions(drafter="none"))
    assert off.generate("The ferry", predicted)[0].stats.drafted == 0


def test_auto_means_the_same_with_a_number_of_draft_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measured at each load, a copy of so small a model pays at one and not at the next.
    monkeypatch.setattr(self_draft, "measured_fit", lambda *_: Fit(1.0, 1.0, (0.1,)))
    names = []
    for number in (None, 3):
        loaded = LLM.load(
            str(directory),
            draft_model=str(checkpoint(0.01)),
            num_draft_tokens=number,
            calibrate=False,
        )
        names.append((loaded.drafter_name, {*loaded.policy.drafters}))
    assert names[0] == names[1]
    assert names[0][1] == {"draft_model", "suffix", "self_draft"}


# --------------------------------------------------------------------------- what cannot be loaded


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes in options are to be found before a model costs a download."""

    def resolve(*args: Any, **options: Any) -> Path:
        raise AssertionError("went on to the model")

    monkeypatch.setattr(foredraft.load, "resolve_model", resolve)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafer": "ngram"}, "unknown option 'drafer'; did you mean 'drafter'"),
        ({"drafter": "ngramm"}, "unknown drafter 'ngramm'; did you mean 'ngram'"),
        ({"drafter": None}, "drafter is None"),
        ({"drafter": 3}, "drafter is 3"),
        (
            {"drafter": "ngram", "drafter_options": {"max_ngram": 2}},
            "did you mean 'max_ngram_size'",
        ),
        ({"drafter_options": ["max_ngram_size"]}, "it must map names to values"),
        ({"drafter": "ngram", "draft_model": "x"}, "'ngram' uses no draft model, but 'x' was"),
        ({"drafter": "draft-model"}, "needs a draft model"),
        ({"draft_model": ""}, "draft_model is ''"),
        ({"model": ""}, "model is ''"),
        ({"model": 7}, "model is 7"),
        ({"dtype": "float23"}, "unknown dtype 'float23'; did you mean 'float32'"),
        ({"dtype": torch.float32}, "unknown dtype 'torch.float32'; did you mean 'float32'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": 0}, "unknown device '0'"),
        ({"backend": "nativ"}, "unknown backend 'nativ'; did you mean 'native'"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1; it must be at least 0"),
        ({"num_draft_tokens": True}, "num_draft_tokens must be a whole number, not True"),
        ({"num_draft_tokens": 2.0}, "num_draft_tokens must be a whole number, not 2.0"),
        ({"num_draft_tokens": float("nan")}, "num_draft_tokens must be a whole number, not nan"),
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"threads": 10**5}, r"threads is 100000; this machine has \d+ for us"),
        ({"max_context": 0}, "max_context is 0"),
        ({"max_context": 1}, "max_context is 1; it must be at least 2"),
        ({"device": "cpu:abc"}, "a number goes with cuda alone"),
        ({"device": "cuda:"}, "a number goes with cuda alone"),
        ({"exact": "no"}, "exact must be True or False, not 'no'"),
        ({"calibrate": 1}, "calibrate must be True or False, not 1"),
        ({"max_batch_size": None}, "max_batch_size must be a whole number, not None"),
        ({"model": "x" * 5000}, "no file can have such a name"),
        ({"model": "x/\0"}, "no file can have such a name"),
        ({"draft_model": "\ud800"}, "draft_model is no valid Unicode text"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batch_size": True}, "max_batch_size must be a whole number, not True"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0; it must be at least 1"),
        ({"max_step_tokens": "many"}, "max_step_tokens must be a whole number, not 'many'"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM.load(**options)


@pytest.mark.parametrize(("asked", "most"), [(None, 40), (7, 7)])
def test_prompts_are_read_in_steps_of_the_size_that_was_asked_for(
    asked: int | None, most: int
) -> None:
    steps: list[StepRecord] = []
    options = LoadOptions(drafter="none", max_step_tokens=asked)
    llm = LLM(TableModel.random(12, seed=1), None, options, trace=steps.append)
    llm.generate([[1, 2] * 20], SamplingParams(max_tokens=2))
    assert max(row.num_read for step in steps for row in step.rows) == most


# ------------------------------------------------------------------------- what cannot be generated


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ("ferry " * 2000, r"prompt is too long: \d+ tokens > 2047 maximum"),
        ([[1, 2, VOCAB_SIZE]], f"prompt token {VOCAB_SIZE} is not an id below {VOCAB_SIZE}"),
        ([[1, 2.0]], "prompt token 2.0 is not a token id"),
        ([[1, None]], "prompt token None is not a token id"),
        ([{"role": "user", "content": "hi"}], "`chat` takes messages"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_is_generated(
    llm: LLM, prompt: Any, message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        llm.generate(prompt, PARAMS)
    if not isinstance(prompt, str):
        with pytest.raises(PromptError, match=message):
            llm.generate([TEXTS[0], *prompt, TEXTS[1]], PARAMS)
    assert not llm.engine.has_work
    assert is_empty(llm.target.cache)


def test_a_stream_refuses_a_bad_prompt_when_it_is_asked_for(llm: LLM) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        llm.stream("", PARAMS)


def test_a_base_model_has_no_chat(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template=None)
    llm = plain_llm(tokenizer=Tokenizer(tmp_path))
    with pytest.raises(ConfigError, match="has no chat template"):
        llm.chat(MESSAGES)


def test_an_interrupted_batch_leaks_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([llm.target.score] * 3)

    def interrupted(rows: Any, taps: Any = ()) -> Any:
        score = next(calls, None)
        if score is None:
            raise KeyboardInterrupt
        return score(rows, taps)

    with monkeypatch.context() as patch:
        patch.setattr(llm.target, "score", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, PARAMS)
    assert not llm.engine.has_work
    assert is_empty(llm.target.cache)
    assert llm.generate(TEXTS[:1], PARAMS)[0].finish_reason == "length"
