"""Completions, responses and messages: whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from foredraft.control.acceptance import FirstToken
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.context import served_name
from foredraft.server.dialects.chat import ChatRequest
from foredraft.server.dialects.completions import CompletionRequest
from foredraft.server.dialects.fields import RequestBody
from foredraft.server.dialects.messages import MessagesRequest
from foredraft.server.dialects.responses import ResponsesRequest
from foredraft.server.dialects.tokenize import DetokenizeRequest
from foredraft.server.metrics import Metrics
from foredraft.server.wire import FEW, Made
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer
from tests.server.conftest import Running, loading, running, wait_until
from tests.server.events import data_of, names_of
from tests.server.marks import refusals
from tests.server.test_lifecycle import SlowTarget

USER = [{"role": "user", "content": "Where is the ferry?"}]
COMMON: dict[str, Any] = {"seed": 7, "ignore_eos": True}


def chat_text(client: httpx.Client, **more: Any) -> str:
    body = {"messages": USER, "max_tokens": 20, **COMMON, **more}
    return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


# ------------------------------------------------------------------------------------- completions


@pytest.fixture
def tokenizer(shared: Running) -> Tokenizer:
    return shared.context.tokenizer


def test_prompts_in_every_form(client: httpx.Client, tokenizer: Tokenizer) -> None:
    texts = ["The ferry", "A draft"]
    ids = [tokenizer.encode(text) for text in texts]

    def replies(prompt: Any) -> list[str]:
        body = {"prompt": prompt, "max_tokens": 8, **COMMON}
        choices = client.post("/v1/completions", json=body).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["text"] for choice in choices]

    expected = [*replies(texts[0]), *replies(texts[1])]
    assert replies(texts) == expected
    assert replies(ids) == expected
    assert replies(ids[0]) == expected[:1]


def test_several_replies_to_several_prompts(client: httpx.Client) -> None:
    body = {"prompt": ["The ferry", "A draft"], "n": 2, "max_tokens": 5, **COMMON}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 20
    single = {"prompt": "A draft", "max_tokens": 5, "seed": 8, "ignore_eos": True}
    alone = client.post("/v1/completions", json=single).json()
    assert answer["choices"][3]["text"] == alone["choices"][0]["text"]
    chunks = data_of(client.post("/v1/completions", json=body | {"stream": True}))
    for choice in answer["choices"]:
        texts = [
            each["text"]
            for chunk in chunks[:-1]
            for each in chunk["choices"]
            if each["index"] == choice["index"]
        ]
        assert "".join(texts) == choice["text"]


def test_sixteen_tokens_unless_told_otherwise(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "The", **COMMON}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["object"] == "text_completion"


def test_echo(client: httpx.Client) -> None:
    body = {"prompt": "The ferry", "max_tokens": 4, **COMMON}
    plain = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    echoed = client.post("/v1/completions", json=body | {"echo": True}).json()
    assert echoed["choices"][0]["text"] == "The ferry" + plain
    chunks = data_of(client.post("/v1/completions", json=body | {"echo": True, "stream": True}))
    streamed = "".join(c["text"] for chunk in chunks[:-1] for c in chunk["choices"])
    assert streamed == "The ferry" + plain
    nothing = client.post("/v1/completions", json=body | {"echo": True, "max_tokens": 0}).json()
    assert nothing["choices"][0]["text"] == "The ferry"
    assert nothing["usage"]["completion_tokens"] == 0


def test_an_echo_repeats_what_was_sent_and_no_start_token(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    saved = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    start = "<|im_start|>"
    saved.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, saved.token_to_id(start))]
    )
    saved.save(str(tmp_path / "tokenizer.json"))

    load = loading(TableModel.random(VOCAB_SIZE, seed=5), tmp_path, drafter="none")
    body = {"prompt": "The ferry", "echo": True, "logprobs": 0, "max_tokens": 3, **COMMON}
    with running(load) as server, server.client() as client:
        for more in ({}, {"stream": True}, {"max_tokens": 0}, {"prompt": ["The ferry"]}):
            response = client.post("/v1/completions", json=body | more)
            chunks = data_of(response)[:-1] if "stream" in more else [response.json()]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            text = "".join(choice["text"] for choice in choices)
            assert text.startswith("The ferry")
            scored = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            tokens = [token for each in scored for token in each["tokens"]]
            offsets = [offset for each in scored for offset in each["text_offset"]]
            assert start not in tokens[:1]
            assert offsets[0] == 0
            assert "".join(tokens).startswith("The ferry")
            assert len(tokens) == sum(len(each["token_logprobs"]) for each in scored)
        ids = server.context.tokenizer.encode("The ferry")
        told = client.post("/v1/completions", json=body | {"prompt": ids}).json()["choices"][0]
        assert told["text"].startswith(f"{start}The ferry"), "ids are echoed as they were sent"


def test_prompts_are_scored(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The ferry crosses")
    body = {"prompt": [ids, ids[:3]], "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = client.post("/v1/completions", json=body | {"temperature": 0}).json()["choices"]
    assert len(first["logprobs"]["tokens"]) == len(ids) + 1
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["top_logprobs"][0] is None
    assert all(value <= 0 for value in first["logprobs"]["token_logprobs"][1:])
    assert first["logprobs"]["token_logprobs"][1:3] == second["logprobs"]["token_logprobs"][1:3]
    offsets = first["logprobs"]["text_offset"]
    for token, offset in zip(first["logprobs"]["tokens"], offsets, strict=True):
        assert first["text"][offset : offset + len(token)] == token


def test_without_a_reply_a_prompt_is_scored(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The ferry crosses the river. ")
    body = {"prompt": [ids, ids[:9], ids[:1]], "echo": True, "logprobs": 2, "max_tokens": 0}
    answer = client.post("/v1/completions", json=body).json()
    for choice, prompt in zip(answer["choices"], body["prompt"], strict=True):  # type: ignore[call-overload]
        assert choice["finish_reason"] == "length"
        assert choice["text"] == tokenizer.decode(prompt)
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt)
        assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    foreign = client.post("/v1/completions", json=body | {"prompt": [5, VOCAB_SIZE]})
    assert "prompt token 300 is not an id below 300" in foreign.json()["error"]["message"]


@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("n", [1, 2])
def test_prompts_are_scored_in_streams_too(client: httpx.Client, max_tokens: int, n: int) -> None:
    body = {"prompt": "The ferry", "echo": True, "logprobs": 2, "n": n, **COMMON}
    body["max_tokens"] = max_tokens
    whole = client.post("/v1/completions", json=body).json()["choices"]
    chunks = data_of(client.post("/v1/completions", json=body | {"stream": True}))[:-1]
    told = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    for choice in whole:
        own = [each["logprobs"] for each in told if each["index"] == choice["index"]]
        added = {name: [x for each in own for x in each[name]] for name in choice["logprobs"]}
        assert added == choice["logprobs"]


# --------------------------------------------------------------------------------------- responses


def test_a_response(client: httpx.Client) -> None:
    body = {"input": "Where is the ferry?", "max_output_tokens": 20, **COMMON}
    answer = client.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == chat_text(client)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][-1]["status"] == "incomplete"
    assert answer["usage"]["output_tokens"] == 20
    assert answer["store"] is False


def test_a_response_streamed(client: httpx.Client) -> None:
    body = {"input": USER, "max_output_tokens": 20, "stream": True, **COMMON}
    response = client.post("/v1/responses", json=body)
    events = data_of(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = names_of(response)
    assert names == [event["type"] for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == chat_text(client)
    assert events[-2]["item"]["status"] == "incomplete"
    one = data_of(client.post("/v1/responses", json=body | {"max_output_tokens": 1}))
    assert [e["item"]["status"] for e in one if "item" in e] == ["in_progress", "incomplete"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == chat_text(client)


@pytest.mark.parametrize("num_tokens", [20, 80])
def test_a_response_says_how_likely_its_tokens_were(
    client: httpx.Client, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = {"input": USER, "max_output_tokens": num_tokens, **asked, **COMMON}
    made, loops = Made.__iter__, list[Any]()

    def noted(entries: Made) -> Iterator[Any]:
        loops.append(asyncio._get_running_loop())
        return made(entries)

    monkeypatch.setattr(Made, "__iter__", noted)
    part = client.post("/v1/responses", json=body).json()["output"][0]["content"][0]
    assert len(part["logprobs"]) == num_tokens
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    events = data_of(client.post("/v1/responses", json=body | {"stream": True}))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    told = [entry for delta in deltas for entry in delta["logprobs"]]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]
    assert told == part["logprobs"][: len(told)]
    assert len(told) >= num_tokens - 1  # the last may complete no character
    assert bool(loops) == (num_tokens > FEW)
    assert not any(loops), "streams wait while a million numbers are written on the loop"


def test_agents_probe_and_bring_tools_that_nobody_knows(client: httpx.Client) -> None:
    tools = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "x"}]
    body = {"input": [], "max_output_tokens": 1, "tools": tools, "store": False}
    more = {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}}
    response = client.post("/v1/responses", json=body | more)
    assert response.status_code == 200, response.text
    named = response.headers["x-foredraft-ignored"].split(", ")
    assert {"reasoning", "store", "tools[0]", "tools[1]", "tools[2]"} <= {*named}
    for truncation, is_named in (("auto", True), ("disabled", False)):
        response = client.post("/v1/responses", json=body | {"truncation": truncation})
        named = response.headers["x-foredraft-ignored"].split(", ")
        assert ("truncation" in named) is is_named


def test_text_and_its_calls_are_one_message_in_every_dialect(client: httpx.Client) -> None:
    """The same conversation has the same tokens, so the cache finds it and templates alternate."""
    call = {"name": "look", "arguments": '{"at": 1}'}
    chat = [
        *USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    items = [
        {"type": "additional_tools", "tools": []},
        {"type": "item_reference", "id": "m1"},
        {"type": "local_shell_call", "call_id": "s1"},
        *USER,
        {"type": "message", "role": "assistant", "content": "Let me see."},
        {"type": "web_search_call", "id": "w"},
        {"type": "function_call", "call_id": "c1", **call},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    used = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
    blocks = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, used]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}],
        },
    ]
    answers = [
        client.post(path, json=body | COMMON)
        for path, body in (
            ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
            ("/v1/responses", {"input": items, "max_output_tokens": 1}),
            ("/v1/messages", {"messages": blocks, "max_tokens": 1}),
        )
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[1].headers["x-foredraft-ignored"] == "input[0], input[1], input[2], input[5]"
    usages = [answer.json()["usage"] for answer in answers]
    sizes = [
        usages[0]["prompt_tokens"],
        usages[1]["input_tokens"],
        usages[2]["input_tokens"] + usages[2]["cache_read_input_tokens"],
    ]
    assert len(set(sizes)) == 1


def test_the_model_sees_that_a_tool_has_failed_and_the_order_of_what_was_said() -> None:
    from foredraft.server.dialects.messages import MessagesRequest

    failed = {"type": "tool_result", "tool_use_id": "c", "content": "no such file"}
    content = [
        {"type": "text", "text": "Before."},
        failed | {"is_error": True},
        {"type": "text", "text": "After."},
    ]
    body = MessagesRequest(max_tokens=1, messages=[{"role": "user", "content": content}])
    assert [each["content"] for each in body.chat_messages()] == [
        *("Before.", "Error: no such file", "After."),
    ]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_clients_know_a_prompt_that_is_too_long_by_its_words(
    client: httpx.Client, path: str
) -> None:
    said = [{"role": "user", "content": "the ferry " * 3000}]
    name = "input" if path == "/v1/responses" else "messages"
    error = client.post(path, json={name: said, "max_tokens": 1}).json()["error"]
    assert "prompt is too long: " in error["message"]
    assert "maximum context length is" in error["message"]
    if path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ],
)
def test_what_needs_a_memory_is_refused(
    client: httpx.Client, more: dict[str, Any], param: str
) -> None:
    response = client.post("/v1/responses", json={"input": "x"} | more)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


# ---------------------------------------------------------------------------------------- messages


def test_a_message(client: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 20, **COMMON}
    response = client.post("/v1/messages", json=body | {"wibble": 1})
    answer = response.json()
    assert response.headers["x-foredraft-ignored"] == "wibble"
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["stop_reason"] == "max_tokens"
    assert chat_text(client) == answer["content"][0]["text"]
    assert answer["usage"]["output_tokens"] == 20


def test_what_vllm_adds_is_there_in_messages_too(client: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 60, "seed": 7}
    more: dict[str, Any] = {"structured_outputs": {"choice": ["left", "right"]}}
    answer = client.post("/v1/messages", json=body | more).json()
    assert answer["content"][0]["text"] in ("left", "right")
    biased = {"logit_bias": {"9": 100}, "stop_token_ids": [9], "min_tokens": 2}
    answer = client.post("/v1/messages", json=body | biased | {"repetition_penalty": 1.1}).json()
    assert 2 <= answer["usage"]["output_tokens"] < 60


def test_a_message_streamed(client: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 20, "seed": 7}
    whole = client.post("/v1/messages", json=body).json()
    response = client.post("/v1/messages", json=body | {"stream": True})
    events, names = data_of(response), names_of(response)
    assert names[0] == "message_start"
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_stop_sequence_is_named(client: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 20, "seed": 7}
    text = client.post("/v1/messages", json=body).json()["content"][0]["text"]
    stop = next(char for char in text[2:] if char.isprintable() and char not in text[:2])
    answer = client.post("/v1/messages", json=body | {"stop_sequences": ["zzzz", stop]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    body |= {"include_stop_str_in_output": True}
    answer = client.post("/v1/messages", json=body | {"stop_sequences": [stop]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"].endswith(stop)


def test_counting_includes_system_and_tools(client: httpx.Client) -> None:
    tool = {"name": "look", "description": "Look out.", "input_schema": {"type": "object"}}
    counts = [
        client.post("/v1/messages/count_tokens", json={"messages": USER} | more).json()
        for more in ({}, {"system": "Be brief."}, {"system": "Be brief.", "tools": [tool]})
    ]
    numbers = [count["input_tokens"] for count in counts]
    assert numbers == sorted(set(numbers))


def test_errors_have_anthropics_shape(client: httpx.Client) -> None:
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for body in ({"messages": USER}, {"messages": image, "max_tokens": 1}):
        response = client.post("/v1/messages", json=body)
        assert response.status_code == 400
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == "invalid_request_error"
    missing = client.post("/v1/messages", json={"messages": USER, "max_tokens": 1, "model": "x"})
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


# ------------------------------------------------------------------------------------------- others


def test_models(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "other"]
    assert listed["models"] == listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "other")
    assert datetime.fromisoformat(listed["data"][0]["created_at"]).timestamp() > 1e9
    assert client.get("/v1/models/other").json()["id"] == "other"
    assert client.get("/v1/models/gpt-5").status_code == 404


def test_tokens_there_and_back(client: httpx.Client) -> None:
    counted = client.post("/tokenize", json={"prompt": "Straße 東京", "return_token_strs": True})
    answer = counted.json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {
        "prompt": "Straße 東京"
    }
    assert client.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"


def test_health(client: httpx.Client) -> None:
    for path in ("/health", "/health?ready", "/health?ready=1", "/health?ready=0", "/ready"):
        assert client.get(path).status_code == 200


def test_requests_with_a_prediction_run_in_the_same_engine(tokenizer: Tokenizer) -> None:
    """Metrics and health are about all of them."""
    load = loading(SlowTarget.random(VOCAB_SIZE, seed=5), tokenizer, drafter="suffix")
    body = {"messages": USER, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    expected = {"prediction": {"type": "content", "content": "The ferry"}}

    def running_requests() -> float:
        lines = client.get("/metrics").text.splitlines()
        found = next(each for each in lines if each.startswith("foredraft:num_requests_running "))
        return float(found.split()[1])

    with running(load) as server, server.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body | expected) as reply:
            lines = reply.iter_lines()  # kept: without it the connection is closed
            next(lines)
            wait_until(lambda: running_requests() == 1)
        engine = server.context.engine
        predictions = server.context.llm._for_predictions
        assert predictions is not None
        assert "prediction" in predictions.drafters
        engine.worker.problem = "its thread has failed"
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        engine.worker.problem = None


def test_a_drafter_below_its_promise_is_a_figure() -> None:
    metrics = Metrics()
    first_tokens = [
        FirstToken("head", "greedy", 0.7, 0.4, 1000.0),
        FirstToken("head", "much", 0.7, 0.68, 1000.0),
    ]
    metrics._controller = SimpleNamespace(first_tokens=first_tokens)  # type: ignore[assignment]
    shown = metrics.render().decode()
    for noise, below in (("greedy", 1.0), ("much", 0.0)):
        line = f'foredraft:drafter_below_promise{{drafter="head",noise="{noise}"}} {below}'
        assert line in shown


USER_FIELDS = [{"role": "user", "content": "x"}]
MINIMAL: dict[type[RequestBody], dict[str, Any]] = {
    ChatRequest: {"messages": USER_FIELDS},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"messages": USER_FIELDS, "max_tokens": 1},
}
OUR_OWN = {"coupling", "cache_salt", "priority", "structured_outputs", "prediction", "seed"}


def lookalikes(value: Any) -> list[Any]:
    """Values that Python, or careless code, takes for this one."""
    if isinstance(value, bool):
        return [1, "true"] if value else [0, "", []]
    return [True, str(value)] if isinstance(value, int) else []


def accepted() -> list[tuple[type[RequestBody], str, Any]]:
    return [
        (model, name, value)
        for model in MINIMAL
        for name, mark in refusals(model).items()
        for value in mark.harmless
    ]


@pytest.mark.parametrize(("model", "name", "value"), accepted())
def test_a_refused_field_may_ask_for_nothing_and_its_lookalikes_may_not(
    model: type[RequestBody], name: str, value: Any
) -> None:
    body = MINIMAL[model]
    for harmless in (value, None):
        model.model_validate({**body, name: harmless})
    for other in lookalikes(value):
        with pytest.raises(ValidationError, match=name):
            model.model_validate({**body, name: other})


@pytest.mark.parametrize("model", MINIMAL)
def test_every_refused_field_is_refused(model: type[RequestBody]) -> None:
    for name in refusals(model):
        with pytest.raises(ValidationError, match=name):
            model.model_validate({**MINIMAL[model], name: {"unheard": "of"}})


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        (CompletionRequest, {"prompt": [1, "x"] * 50_000}),
        (CompletionRequest, {"prompt": [[1, "x"]] * 50_000}),
        (CompletionRequest, {"stop_token_ids": ["x"] * 50_000}),
        (ChatRequest, {"logit_bias": {str(-i - 1): 1 for i in range(50_000)}}),
        (ChatRequest, {"tools": ["x"] * 50_000}),
        (ResponsesRequest, {"input": ["x"] * 50_000}),
        (MessagesRequest, {"messages": ["x"] * 50_000}),
        (DetokenizeRequest, {"tokens": ["x"] * 50_000}),
    ],
)
def test_the_check_ends_at_the_first_wrong_entry(
    model: type[RequestBody], wrong: dict[str, Any]
) -> None:
    """A body of 4 MB with a million wrong entries stopped the event loop for 15 s."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate({**MINIMAL.get(model, {}), **wrong})
    assert raised.value.error_count() < 10


def test_a_local_model_is_served_by_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "tiny-Q4_K_M.gguf"
    file.touch()
    assert served_name(str(file)) == "tiny-Q4_K_M"
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("org/tiny:Q4_K_M") == "org/tiny:Q4_K_M"
    assert served_name(None) == "foredraft"
