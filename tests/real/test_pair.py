"""Qwen2.5-Coder 1.5B with the 0.5B as its draft model, both in 4 bits, as people download them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from benchmarks.against_llama_cpp import compare, distances
from foredraft import LLM, SamplingParams
from foredraft.bench.prompts import load_prompts
from foredraft.core import verify
from foredraft.core.proposal import Proposal
from foredraft.core.verify import Rule, Verdict
from foredraft.models.text.tokenizer import Tokenizer
from tests.exactness.reference_rules import verify_token_rule
from tests.real.conftest import TEXTS, gguf_of
from tests.server.conftest import running

TARGET, DRAFT = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"
CODE = [
    {
        "role": "user",
        "content": "Write a Python function that counts the vowels of a text. Code alone.",
    }
]
PROSE = [{"role": "user", "content": "Why do ferries not run in a storm? Answer in two sentences."}]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, seed=7)
FILTERED = replace(SEEDED, temperature=0.7, top_p=0.9, top_k=50)
PENALISED = replace(SEEDED, repetition_penalty=1.1, presence_penalty=0.3)
ALL = [GREEDY, SEEDED, FILTERED, PENALISED]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM.load(TARGET, drafter="none", calibrate=False)


@pytest.fixture(scope="module")
def pair() -> LLM:
    return load_pair()


def load_pair(**options: Any) -> LLM:
    usual = {"drafter": "draft_model", "draft_model": DRAFT, "num_draft_tokens": 3}
    return LLM.load(TARGET, calibrate=False, **usual | options)


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_texts_become_the_tokens_of_llama_cpp(name: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(gguf_of(name)), vocab_only=True, verbose=False)
    ours = LLM.load(name, drafter="none", calibrate=False).tokenizer
    chat = "<|im_start|>user\nHi<|im_end|>\n<tool_call>\n"
    whole = ours.decode(ours.encode_chat(CODE), skip_special_tokens=False)
    for text in (*TEXTS, chat, "don't I'll we've 'tis\r\n", whole):
        expected = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text) == expected
        assert ours.decode(expected, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", [TARGET, DRAFT])
@pytest.mark.parametrize("messages", [CODE, PROSE], ids=["code", "prose"])
def test_greedy_text_is_that_of_llama_cpp(name: str, messages: Any) -> None:
    pytest.importorskip("llama_cpp")
    file = gguf_of(name)
    prompt = Tokenizer(_directory(name)).encode_chat(messages)
    found = compare(file, prompt, 48, file.name)
    assert found.is_equal, found.line


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_logits_are_no_farther_from_float32_than_those_of_llama_cpp(name: str) -> None:
    """The float32 is that of the same file's weights."""
    pytest.importorskip("llama_cpp")
    encode = Tokenizer(_directory(name)).encode_chat
    chats = [encode([{"role": "user", "content": one.text}]) for one in load_prompts(None, 3)]
    found = distances(gguf_of(name), [chat[:64] for chat in chats])
    ours, theirs = found["ours"], found["llama.cpp"]
    assert ours.mean_kl < min(theirs.mean_kl, 0.002), found
    assert ours.agreement > 0.95, found


def _directory(name: str) -> Any:
    from foredraft.models.files.store import resolve_model

    return resolve_model(name)


@pytest.mark.parametrize("params", ALL, ids=["greedy", "seeded", "filtered", "penalised"])
def test_drafts_change_no_text(plain: LLM, pair: LLM, params: SamplingParams) -> None:
    """Alone and in a batch, of chats that draft more and less."""
    chats = [CODE, PROSE]
    alone = [pair.chat(messages, params) for messages in chats]
    expected = [plain.chat(messages, params).token_ids for messages in chats]
    assert [result.token_ids for result in alone] == expected
    assert all(result.stats.accepted > 0 for result in alone)
    prompts = [pair.tokenizer.encode_chat(messages) for messages in chats] * 2
    batch = pair.generate(prompts, params)
    assert [result.token_ids for result in batch[:2]] == expected


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ("chain", verify.verify_target_only),
        ("best-first", verify.verify_target_only),
        ("chain", verify_token_rule),
        ("chain", verify.verify_block),
        ("best-first", verify.verify_traversal),
    ],
)
def test_every_rule_runs(
    shape: str, rule: Rule, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded texts are those of plain decoding, drawn ones the same alone and in a batch."""
    chains: list[bool] = []

    def noted(proposal: Proposal, *others: Any) -> Verdict:
        chains.append(proposal.tree.is_chain)
        return rule(proposal, *others)

    llm = load_pair(num_draft_tokens=4, drafter_options={"shape": shape})
    is_seeded = rule is verify.verify_target_only
    if rule is verify_token_rule:  # the engine has block verification, which accepts more
        llm.policy.rule = noted
    else:
        monkeypatch.setattr(verify, rule.__name__, noted)
    params = replace(SEEDED, coupling="seeded" if is_seeded else "drawn")
    alone = [llm.chat(messages, params) for messages in (CODE, PROSE)]
    assert all(result.stats.accepted > 0 for result in alone)
    assert all(chains) == (shape == "chain")
    prompts = [llm.tokenizer.encode_chat(messages) for messages in (CODE, PROSE)]
    others = llm.generate(prompts, params)
    if is_seeded:
        others += [plain.chat(messages, params) for messages in (CODE, PROSE)]
    for index, each in enumerate(others):
        assert each.token_ids == alone[index % 2].token_ids


# ------------------------------------------------------------------------------------ the server

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How will the weather be in Oslo for three days?"}],
    "temperature": 0,
    "max_tokens": 64,
}


@pytest.fixture(scope="module")
def client(pair: LLM) -> Iterator[httpx.Client]:
    with running(lambda trace: pair) as server, server.client() as client:
        client.timeout = httpx.Timeout(120)
        yield client


def test_a_forced_call_is_parsed(client: httpx.Client) -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    body = ASKED | {"tools": [TOOL], "tool_choice": forced}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] == "Oslo"
    assert arguments["days"] == 3


def test_a_reply_fits_its_schema(client: httpx.Client) -> None:
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    named = {"name": "place", "schema": schema, "strict": True}
    body = ASKED | {"response_format": {"type": "json_schema", "json_schema": named}}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    content = json.loads(answer.json()["choices"][0]["message"]["content"])
    assert isinstance(content["city"], str)
    assert isinstance(content["days"], int)
