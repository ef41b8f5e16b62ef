"""Inputs of `LLM`: prompts, conversations and parameters of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.core.errors import ConfigError, PromptError
from foredraft.models.text.prompts import as_batch, checked_messages
from foredraft.models.text.tokenizer import Tokenizer
from tests.conformance.harness import checkpoint

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
MESSAGE = {"role": "user", "content": "Where is the ferry?"}
HALF = "a\ud800b"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.load(str(checkpoint(0.0)), dtype="float32", drafter="none")


# ------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize(
    "prompt",
    [b"abc", bytearray(b"abc"), memoryview(b"abc"), {1: 2}, {1, 2}, {"role": "user"}, 5, None, 1.5],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    for handed in (prompt, ["The ferry", prompt]):
        with pytest.raises(PromptError, match="a prompt is text or token ids, not"):
            llm.generate(handed, PARAMS)
    with pytest.raises(PromptError, match="a prompt is text or token ids, not"):
        llm.stream(prompt, PARAMS)


def test_half_a_surrogate_pair_is_named(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"the prompt is no valid Unicode text: .* character 1"):
        llm.generate(HALF, PARAMS)


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda rows: (row for row in rows)])
def test_rows_of_an_array_are_prompts(llm: LLM, make: Callable[[Any], Any]) -> None:
    for rows in ([[5, 9], [7, 8]], [[5], [7]]):
        results = llm.generate(make(rows), PARAMS)
        assert [r.num_prompt_tokens for r in results] == [len(rows[0])] * 2


def test_an_array_of_ids_is_one_prompt() -> None:
    assert len(as_batch(np.array([1, 2]))) == len(as_batch(torch.tensor([1, 2]))) == 1


def test_a_prompt_is_not_shown_at_full_length(llm: LLM) -> None:
    with pytest.raises(PromptError) as caught:
        llm.generate([{"text": "x" * 10**6}], PARAMS)
    assert len(str(caught.value)) < 300


# ------------------------------------------------------------------------------------ conversations


def test_a_conversation_may_come_from_a_generator(llm: LLM) -> None:
    reply = llm.chat((message for message in [MESSAGE]), PARAMS)
    assert reply.num_prompt_tokens == llm.chat([MESSAGE], PARAMS).num_prompt_tokens


def test_parts_of_text_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "the ferry?"}]
    in_parts = llm.chat([{"role": "user", "content": parts}], PARAMS)
    assert in_parts.num_prompt_tokens == llm.chat([MESSAGE], PARAMS).num_prompt_tokens


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hi", ConfigError, "messages must be a list of messages, not 'hi'"),
        (iter([]), ConfigError, "the conversation is empty"),
        ([MESSAGE, "hi"], ConfigError, r"messages\[1\]: a message needs a role"),
        ([{"role": ["user"], "content": "x"}], ConfigError, r"messages\[0\]: a message needs"),
        ([{"role": "user", "content": b"x"}], ConfigError, r"messages\[0\]\.content must be text"),
        (
            [{"role": "user", "content": {"text": "x"}}],
            ConfigError,
            r"messages\[0\]\.content must be text or a list of text parts, not \{'text': 'x'\}",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            ConfigError,
            r"messages\[0\]\.content\[0\] is of type 'image_url'; text is all there is here",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            ConfigError,
            r"messages\[0\]\.content\[0\]\.text must be text, not 3",
        ),
        (
            [MESSAGE, {"role": "user", "content": HALF}],
            PromptError,
            r"messages\[1\]\.content is no valid Unicode text",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": HALF}]}],
            PromptError,
            r"messages\[0\]\.content\[0\]\.text is no valid Unicode text",
        ),
        ([{**MESSAGE, "name": HALF}], PromptError, r"messages\[0\]\.name is no valid Unicode"),
        ([{**MESSAGE, "x": [1, {2}]}], ConfigError, r"messages\[0\]\.x\[1\] is \{2\}"),
    ],
)
def test_malformed_conversations_are_explained(
    llm: LLM, messages: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.chat(messages, PARAMS)


def test_a_conversation_within_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="without end"):
        checked_messages([{**MESSAGE, "x": endless}])


# --------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("params", [{"temperature": 1.0}, [PARAMS], "greedy", 0.7, SamplingParams])
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    for call in (
        lambda: llm.generate("The ferry", params),
        lambda: llm.chat([MESSAGE], params),
        lambda: llm.stream("The ferry", params),
        lambda: llm.stream_chat([MESSAGE], params),
    ):
        with pytest.raises(ConfigError, match=r"params must be SamplingParams\(…\)"):
            call()


def test_a_hot_request_of_whole_numbers_runs(llm: LLM) -> None:
    params = SamplingParams(temperature=2**64, seed=np.uint64(2**63), max_tokens=np.int64(3))
    assert len(llm.generate("The ferry", params)[0].token_ids) <= 3


def test_text_that_the_vocabulary_cannot_spell_is_the_requests_error(tmp_path: Any) -> None:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import WordLevel

    fast = FastTokenizer(WordLevel({"Read": 0, "the": 1}, unk_token="the"))
    fast.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode("x") == [1]
