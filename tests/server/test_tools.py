"""Tools: shown to the model, read from its reply, streamed as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.models.text.tokenizer import Tokenizer
from tests.server.conftest import Running, running
from tests.server.events import data_of
from tests.server.scripted import one_of, replying

USER = [{"role": "user", "content": "Weather?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
REPLY = (
    'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "Köln {1}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
BODY: dict[str, Any] = {"messages": USER, "tools": [TOOL], "temperature": 0}


@pytest.fixture(scope="module")
def client(tokenizer_directory: Path) -> Iterator[httpx.Client]:
    load = replying(Tokenizer(tokenizer_directory), REPLY)
    with running(load) as server, server.client() as client:
        yield client


def test_calls_are_read_from_a_reply(client: httpx.Client) -> None:
    choice = client.post("/v1/chat/completions", json=BODY).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    first, second = message["tool_calls"]
    assert first["type"] == "function"
    assert first["function"]["name"] == "look"
    assert json.loads(first["function"]["arguments"]) == {"at": "Köln {1}"}
    assert second["function"] == {"name": "look", "arguments": "{}"}
    assert first["id"] != second["id"]


def test_arguments_are_streamed(client: httpx.Client) -> None:
    chunks = data_of(client.post("/v1/chat/completions", json=BODY | {"stream": True}))
    deltas = [c["delta"] for chunk in chunks[:-1] for c in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert sum("id" in call for call in calls) == 2
    first = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert json.loads("".join(first)) == {"at": "Köln {1}"}
    assert len([text for text in first if text]) > 1
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_with_malformed_arguments_may_be_sent_back(client: httpx.Client) -> None:
    """A model writes them, and a client repeats what it was told."""
    for arguments in ('{"at": "Kö', "", "not JSON", '{"at": 1}'):
        call = {"id": "c1", "type": "function"}
        function = {"name": "look", "arguments": arguments}
        turns = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call | {"function": function}]},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        ]
        response = client.post("/v1/chat/completions", json=BODY | {"messages": turns})
        assert response.status_code == 200, response.text


def test_strict_arguments_are_promised_only_where_a_call_is_forced(shared: Running) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    body = {"messages": USER, "tools": [tool], "max_tokens": 2}
    with shared.client() as other:
        free = other.post("/v1/chat/completions", json=body)
        forced = other.post("/v1/chat/completions", json=body | {"tool_choice": "required"})
    assert free.headers["x-foredraft-ignored"] == "tools[0].strict"
    assert "x-foredraft-ignored" not in forced.headers


def test_one_call_where_one_is_asked_for(client: httpx.Client) -> None:
    body = BODY | {"parallel_tool_calls": False}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def test_no_tools_no_calls(client: httpx.Client) -> None:
    for more in ({"tool_choice": "none"}, {"tools": []}):
        choice = client.post("/v1/chat/completions", json=BODY | more).json()["choices"][0]
        assert "<tool_call>" in choice["message"]["content"]
        assert "tool_calls" not in choice["message"]


def test_tools_of_messages(client: httpx.Client) -> None:
    tool = {"name": "look", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    body = {"messages": USER, "max_tokens": 200, "tools": [tool], "temperature": 0}
    answer = client.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "tool_use"
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["text", "tool_use", "tool_use"]
    assert answer["content"][1]["input"] == {"at": "Köln {1}"}
    events = data_of(client.post("/v1/messages", json=body | {"stream": True}))
    begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert begun[1]["input"] == {}
    partial = [
        e["delta"]["partial_json"]
        for e in events
        if e["type"] == "content_block_delta" and e["index"] == 1
    ]
    assert json.loads("".join(partial)) == {"at": "Köln {1}"}


def test_tools_of_responses(client: httpx.Client) -> None:
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    body = {"input": "Weather?", "tools": [tool], "temperature": 0}
    output = client.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert json.loads(output[1]["arguments"]) == {"at": "Köln {1}"}
    events = data_of(client.post("/v1/responses", json=body | {"stream": True}))
    done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert json.loads(done[0]["arguments"]) == {"at": "Köln {1}"}


def test_responses_name_the_tools_that_are_allowed(shared: Running) -> None:
    """One of three, which must be called: the others are not even shown."""
    names = ("look", "leap", "land")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "name": name, "parameters": schema} for name in names]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "leap"}, {"type": "web_search"}],
    }
    body = {"input": "Weather?", "tools": tools, "tool_choice": choice, "seed": 5}
    with shared.client() as client:
        response = client.post("/v1/responses", json=body)
        refused = client.post("/v1/responses", json=body | {"tool_choice": choice | {"tools": 3}})
    assert [item["name"] for item in response.json()["output"]] == ["leap"]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=str
)
def test_a_call_that_is_asked_for_is_made(shared: Running, choice: Any) -> None:
    """By a model that would have said something else, whatever it draws."""
    schema = one_of("at", "here", "there")
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    body = {"messages": USER, "tools": [tool], "tool_choice": choice, "seed": 5}
    with shared.client() as other:
        reply = other.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    call = found["message"]["tool_calls"][0]["function"]
    assert call["name"] == "look"
    assert json.loads(call["arguments"])["at"] in ("here", "there")
