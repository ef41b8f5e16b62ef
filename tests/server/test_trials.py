"""Small inputs that were tried against the server, and what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from foredraft.llm import LLM
from tests.server.conftest import running

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (CHAT, {"response_format": {"type": "json_object", "schema": NUMBER}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object", "schema": NUMBER}}}),
    ],
)
def test_an_object_with_a_schema_is_bound_by_it(
    load: Callable[..., LLM], path: str, form: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    name = "input" if path == "/v1/responses" else "messages"
    with running(load) as server, server.client() as client:
        for seed in range(3):
            body = {name: USER, "seed": seed, "temperature": 1.0, **form}
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            text = (
                found["output"][0]["content"][0]["text"]
                if "output" in found
                else (found["choices"][0]["message"]["content"])
            )
            assert '"n"' in text


@pytest.mark.parametrize("name", ["password", "binary", "path", "int64", "regex", "uri-template"])
def test_an_unknown_format_is_an_annotation(client: httpx.Client, name: str) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    for more in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
        answer = client.post(CHAT, json={"messages": USER, "max_tokens": 4, **more})
        assert answer.status_code == 200, answer.text


def test_a_hopeless_schema_is_refused_in_a_sentence(client: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"$ref": "#"}}}
    answer = client.post(CHAT, json={"messages": USER, "max_tokens": 4, "response_format": form})
    assert len(answer.text) < 700


@pytest.mark.parametrize(
    "more",
    [
        {"top_p": 0, "temperature": 0},
        {"top_logprobs": 0, "logprobs": False},
        {"messages": [*USER, {"role": "assistant", "content": None}, *USER]},
        {"messages": [*USER, {"role": "assistant", "content": None, "reasoning": "m"}, *USER]},
    ],
)
def test_what_says_nothing_is_accepted(client: httpx.Client, more: dict[str, Any]) -> None:
    answer = client.post(CHAT, json={"messages": USER, "max_tokens": 2, **more})
    assert answer.status_code == 200, answer.text


def test_a_reply_that_was_begun_by_the_client_is_refused_and_counted(client: httpx.Client) -> None:
    body = {"messages": [*USER, {"role": "assistant", "content": '{"answer":'}], "max_tokens": 2}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "begins anew" in answer.json()["error"]["message"]
    assert client.post("/v1/messages/count_tokens", json=body).status_code == 200


def test_marks_in_the_strings_of_a_call_are_text() -> None:
    from foredraft.server.formats.hermes import Hermes
    from foredraft.server.replies import ReplyParser

    arguments = json.dumps({"code": "a # </tool_call> }{"})
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for size in (1, 3, len(text)):
        parser = ReplyParser(Hermes(), (tool,), False, False, False)
        parts = [p for i in range(0, len(text), size) for p in parser.feed(text[i : i + size])]
        parts += parser.close()
        found = "".join(part.text for part in parts if part.kind == "arguments")
        assert json.loads(found) == {"code": "a # </tool_call> }{"}
        assert not any(part.kind == "content" and part.text.strip() for part in parts)


def test_long_answers_are_written_in_pieces() -> None:
    from foredraft.server.wire import JsonResponse

    value = {"a": [{"b": [0.5, "\u00e4"]}] * 130, "c": {"d": list(range(200)), "e": None}, "f": []}
    assert json.loads(JsonResponse(value).body) == value
