"""A grammar whose parser outgrows its bounds while a reply is written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.models.text.tokenizer import Tokenizer
from tests.server.conftest import running
from tests.server.events import data_of
from tests.server.scripted import replying
from tests.server.test_bad_input import CHAT, USER

SAID = "make properties required, or split the schema"


def wide(number: int) -> dict[str, Any]:
    names = (f"p{number}" for number in range(60))
    return {
        "type": "object",
        "properties": {name: {} for name in names},
        "additionalProperties": {"const": number},
    }


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"anyOf": [wide(number) for number in range(4)]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
"""Its first property is narrow, so the tokens that are tried after compilation find nothing."""
FORM = {"type": "json_schema", "name": "deep", "schema": SCHEMA}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (CHAT, {"messages": USER, "response_format": FORM | {"json_schema": FORM}}),
    "text": ("/v1/responses", {"input": "Hello", "text": {"format": FORM}}),
    "structured_outputs": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 99, "structured_outputs": {"json": SCHEMA}},
    ),
}


@pytest.fixture(scope="module")
def client(tokenizer_directory: Path) -> Iterator[httpx.Client]:
    load = replying(Tokenizer(tokenizer_directory), '{"a": "hello", "b": {"p1": 1}}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foredraft.models.text.grammars._MAX_ROW_ITEMS", 400)
        with running(load) as server, server.client() as client:
            yield client


@pytest.mark.parametrize("field", REQUESTS)
def test_the_request_is_told_and_not_the_server(
    client: httpx.Client, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    route, body = REQUESTS[field]
    with caplog.at_level(logging.WARNING):
        answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert SAID in error["message"]
    assert error["message"].startswith(f"{field}: the reply ends after ")
    if route != "/v1/messages":
        assert (error["param"], error["code"]) == (field, "grammar_too_complex")
    assert SAID in caplog.text
    assert "Traceback" not in caplog.text
    assert client.post(CHAT, json={"messages": USER, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("field", REQUESTS)
def test_a_stream_ends_with_the_error_of_its_dialect(client: httpx.Client, field: str) -> None:
    route, body = REQUESTS[field]
    events = data_of(client.post(route, json=body | {"stream": True}))
    assert len(events) > 5  # what came before the error
    last = events[-1]
    error = last if last.get("type") == "error" and "message" in last else last["error"]
    assert error["message"].startswith(f"{field}: the reply ends after ")
    assert SAID in error["message"]
    if route == "/v1/responses":
        failed = events[-2]
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "invalid_prompt"
        assert failed["response"]["error"]["message"] == error["message"]


def test_rules_that_leave_no_token_are_the_request_s_fault_too(client: httpx.Client) -> None:
    rules = {"structured_outputs": {"choice": ["{"]}, "min_tokens": 5}
    answer = client.post(CHAT, json={"messages": USER} | rules)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "no_token_left"
    assert "grammar, min_tokens" in error["message"]
