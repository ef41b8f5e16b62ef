"""Inputs that must be refused; docs/operate/security.md lists the faults that other servers had."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.models.text.chat_encoding import ChatEncoder
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server import bodies, gate
from foredraft.server.bodies import _AT_ONCE, _parsed
from foredraft.server.errors import ApiError
from foredraft.server.gate import _check_structure
from foredraft.system import priority
from tests.models.checkpoints import VOCAB_SIZE
from tests.server.conftest import Running, loading, running
from tests.server.test_lifecycle import CHAT, HEAD, USER

JSON = {"content-type": "application/json"}
ROUTES = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"]


LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
BROKEN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+"}}}
"""A schema that shows what it is when it is compiled."""


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"]
    assert "Traceback" not in response.text
    assert len(response.content) < 4000
    return dict(error)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b'"x"', b"1", b"\xff\xfe", b'{"a":1'])
def test_bodies_that_are_no_objects(client: httpx.Client, route: str, body: bytes) -> None:
    refused(client.post(route, content=body, headers=JSON))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        # numbers out of range, of the wrong type, or not finite
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),  # no logit would be finite
        ({"stream": "yes"}, "stream"),
        # ids outside the vocabulary, and too many of anything
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"bad_words": ["x"] * 5000}, "bad_words"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"messages": USER * 1025}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}] * 129}, "tools"),
        # messages
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        # media, and everything that would make the server call another host
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://x"}}],
                    }
                ]
            },
            "messages",
        ),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        # templates are programs
        ({"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        # grammars
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "x" * 70_000}}, "structured_outputs"),
        ({"guided_regex": "(a+)+"}, "guided_regex"),
        ({"structured_outputs": {"json": "no JSON"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a+"}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BROKEN}}},
            "response_format",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": BROKEN}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        # tools
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [LOOK]}, "tool_choice"),
        ({"tool_choice": LOOK | {"function": {"name": "leap"}}, "tools": [LOOK]}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]}, "tools"),
        # what cannot be honoured is never ignored
        ({"best_of": 3}, "best_of"),
        ({"store": True}, "store"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 1.5}, "priority"),
        ({"priority": -(2**31)}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"prediction": {"type": "image"}}, "prediction"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else value,
)
def test_chat_names_what_it_refuses(client: httpx.Client, more: dict[str, Any], param: str) -> None:
    body = {"messages": USER, "max_tokens": 2} | more
    error = refused(client.post(CHAT, content=json.dumps(body), headers=JSON))
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("route", "more", "param"),
    [
        ("/v1/responses", {"input": 5}, "input"),
        ("/v1/responses", {"max_output_tokens": 1, "min_tokens": 3}, "min_tokens"),
        (
            "/v1/responses",
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
        ),
        ("/v1/responses", {"truncation": "middle"}, "truncation"),
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ("/v1/responses", {"text": {"format": {"type": "grammar"}}}, "text"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": BROKEN}}}, "text"),
        ("/v1/responses", {"input": [{"role": 3, "content": "x"}]}, "input"),
        ("/v1/messages", {"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ("/v1/messages", {"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ("/v1/completions", {"prompt": ["a", [1]]}, "prompt"),
    ],
    ids=str,
)
def test_fields_are_named_as_the_dialect_names_them(
    client: httpx.Client, route: str, more: dict[str, Any], param: str
) -> None:
    body = {"/v1/responses": {"input": "x"}, "/v1/messages": {"messages": USER, "max_tokens": 2}}
    error = refused(client.post(route, json=body.get(route, {}) | more))
    assert error["message"].startswith(param), error
    assert error.get("param", param) == param
    assert "str is" not in error["message"], "pydantic's names are not the client's"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 5000])
def test_numbers_that_are_none(client: httpx.Client, value: str) -> None:
    body = f'{{"messages": {json.dumps(USER)}, "temperature": {value}}}'
    refused(client.post(CHAT, content=body, headers=JSON))


@pytest.mark.parametrize(
    "body",
    [
        *(
            {"prompt": prompt, "max_tokens": 2}
            for prompt in ("", [], [""], [[]], [1, "x"], [[1], "x"], [300], [-1], [2**70], 3)
        ),
        {"prompt": {"a": 1}},
        {"prompt": [True]},
        {"prompt": ["x"] * 65},
        {"prompt": ["x"] * 33, "n": 2},
    ],
    ids=lambda body: str(body)[:50],
)
def test_prompts_that_are_none_or_too_many(client: httpx.Client, body: dict[str, Any]) -> None:
    refused(client.post("/v1/completions", json=body))


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_half_a_surrogate_pair_is_refused_by_field(client: httpx.Client, path: str) -> None:
    error = refused(client.post(path, content=rb'{"prompt": "a\ud800"}', headers=JSON))
    assert error["param"] == "prompt"
    assert "character 1 is half a surrogate pair" in error["message"]


def test_many_long_replies_stay_within_the_context(tokenizer_directory: Path) -> None:
    """The product of n and max_tokens is what memory is asked for."""

    target = TableModel.random(VOCAB_SIZE, seed=5)
    target.max_context = 96
    load = loading(target, tokenizer_directory)
    asked = {"messages": USER, "n": 8, "max_tokens": 2**60, "ignore_eos": True}
    with running(load) as server, server.client() as client:
        answer = client.post(CHAT, json=asked).json()
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert answer["usage"]["completion_tokens"] <= 8 * 96
        assert server.is_idle()


def test_every_limit_can_be_set(load: Callable[..., LLM]) -> None:
    schema = {"type": "json_object", "x": "y" * 40}
    # Each value exceeds one limit and keeps all others, so that one alone refuses it.
    groups: list[dict[str, tuple[int, dict[str, Any], int]]] = [{
        "max_n": (1, {"n": 2}, 400),
        "max_messages": (1, {"messages": USER * 2}, 400),
        "max_tools": (1, {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, 400),
        "max_stop": (1, {"stop": ["a", "b"]}, 400),
        "max_logit_bias": (1, {"logit_bias": {"5": 1, "6": 1}}, 400),
        "max_schema_bytes": (30, {"response_format": schema}, 400),
        "max_depth": (3, {"metadata": {"a": {"b": [1]}}, "stop": ["x"]}, 400),
    }, {
        "max_replies": (1, {"n": 2}, 400),
        "max_stop_characters": (3, {"stop": ["abcd"]}, 400),
        "max_body_bytes": (300, {"user": "x" * 300}, 413),
    }]  # fmt: skip
    body = {"messages": USER, "max_tokens": 1}
    for lowered in groups:
        limits = {name: limit for name, (limit, _, _) in lowered.items()}
        with running(load, **limits) as server, server.client() as client:
            assert client.post(CHAT, json=body).status_code == 200
            for more, status in ((more, status) for _, more, status in lowered.values()):
                refused(client.post(CHAT, json=body | more), status)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stop": 3}, "stop is 3: it must be str or list[str]"),
        ({"temperature": "x", "stop": 3}, "temperature is 'x': input should be a valid number"),
        (
            {"stream_options": {"include_usage": 3, "continuous_usage_stats": 5}},
            "stream_options.include_usage is 3: input should be a valid boolean",
        ),
    ],
)
def test_the_first_wrong_field_is_explained(
    client: httpx.Client, more: dict[str, Any], said: str
) -> None:
    assert refused(client.post(CHAT, json={"messages": USER} | more))["message"] == said


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_nesting_is_bounded_before_anything_is_parsed(client: httpx.Client, opening: str) -> None:
    error = refused(client.post(CHAT, content=opening * 70_000, headers=JSON))
    assert error["code"] == "too_deep"


@pytest.mark.parametrize(
    "many",
    [{str(i): 1 for i in range(150_000)}, [[]] * 300_000, [1.5] * 300_000, ['"'] * 300_000],
    ids=["fields", "lists", "fractions", "strings"],
)
def test_parts_are_bounded_before_anything_is_parsed(client: httpx.Client, many: Any) -> None:
    error = refused(client.post(CHAT, json={"messages": USER, "metadata": many}), 413)
    assert error["code"] == "too_many_parts"


def test_brackets_that_close_nothing_are_counted_no_further() -> None:
    began = time.process_time()
    _check_structure(b"]" * 4_000_000, max_depth=64)
    assert time.process_time() - began < 0.5


def test_parts_within_texts_do_not_count(client: httpx.Client) -> None:
    text = "[1.5, {\"a\": 'é\\'}]\n" * 120_000
    body = {"messages": USER, "metadata": {"a": text}, "max_tokens": 1}
    assert client.post(CHAT, json=body).status_code == 200


def test_large_prompts_in_parts_are_parsed(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": 'a " b'}] * 38_000
    error = refused(client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}))
    assert error["code"] == "context_length_exceeded"


def test_large_prompts_of_ids_are_parsed(client: httpx.Client) -> None:
    body = b'{"prompt":[' + b"5," * 1_300_000 + b"5]}"
    error = refused(client.post("/v1/completions", content=body, headers=JSON))
    assert error["code"] == "context_length_exceeded"
    assert "reads no more" in error["message"]  # before each id's type is looked at


LIST = b"[" + b"7, " * 3000 + b"7]"


@pytest.mark.parametrize(
    "body",
    [
        LIST,
        b'{"a": "\\"\\\\", "p": [' + LIST + b", " + LIST + b"]}",
        b'{"a": "' + LIST + b'", "p": ' + LIST + b', "x": [-Infinity, "-Infinity", NaN]}',
        b"[," + LIST[1:],
        b"[01" + LIST[2:],
        b"[1" + b" " * 5000 + b"2]",
        b"[" + b"123,\n" * 30_000 + b" 9 ]",
        b"[" + b"123," * (_AT_ONCE // 4 + 1) + b"]",
    ],
)
def test_lists_of_numbers_are_parsed_in_pieces(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for a million holds the interpreter's lock for 50 ms, and streams wait."""
    loads, sizes = json.loads, list[int]()

    def noted(text: bytes, **options: Any) -> Any:
        sizes.append(len(text))
        return loads(text, **options)

    def parsed(read: Callable[[bytes], Any]) -> str:
        try:
            return repr(read(body))
        except ValueError as error:
            return type(error).__name__

    monkeypatch.setattr(bodies.json, "loads", noted)
    found = parsed(_parsed)
    assert found == parsed(loads)
    assert max(sizes) < max(_AT_ONCE + 100, len(LIST) + 200)


def test_bodies_are_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Escapes and strings go on from piece to piece."""
    strings = ["", '"', "\\", '\\"', "[[[", '\\\\"{', "e.:"]
    whole = json.dumps([{f"{i}{each}": [each]} for i, each in enumerate(strings * 3)]).encode()
    for size in range(1, 40):
        monkeypatch.setattr(gate, "_PIECE", size)
        found = [*gate._outside_of_strings(whole)]
        assert sum(count for count, _ in found) == 4 * len(strings * 3)
        assert b"".join(plain for _, plain in found) == b"[%b]" % b", ".join([b"{: []}"] * 21)
        _check_structure(whole, max_depth=3)
        with pytest.raises(ApiError, match="deeper than 2"):
            _check_structure(whole, max_depth=2)


def test_other_threads_run_while_a_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a thread that works all along in Python, a step gets the interpreter late."""
    rests = list[float]()
    monkeypatch.setattr(priority.time, "sleep", rests.append)
    monkeypatch.setattr(priority, "_AT_ONCE", -1.0)
    assert len(_parsed(json.dumps([{"type": "text"}] * 4000).encode())) == 4000
    assert len(rests) >= 4000
    rests.clear()
    _check_structure(b" " * 4_000_000, max_depth=1)
    assert len(rests) >= 60


@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
def test_texts_that_are_far_too_long_are_refused_by_their_beginning(
    client: httpx.Client, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MB were encoded for four seconds first, on a core that the streams needed."""
    sizes, encode, ids = list[int](), Tokenizer.encode, ChatEncoder._ids

    def noted(tokenizer: Tokenizer, text: str, *more: bool, **named: bool) -> list[int]:
        sizes.append(len(text))
        return encode(tokenizer, text, *more, **named)

    def noted_ids(fast: Any, text: str) -> list[int]:
        sizes.append(len(text))
        return ids(fast, text)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    monkeypatch.setattr(ChatEncoder, "_ids", staticmethod(noted_ids))
    text = "a b " * 40_000
    name = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(route, "messages")
    given = text if name != "messages" else [{"role": "user", "content": text}]
    error = refused(client.post(route, json={name: given, "max_tokens": 2}))
    assert "prompt is too long: " in error["message"]
    assert len(sizes) == 1
    assert max(sizes) < len(text) / 2
    assert client.post("/tokenize", json={"prompt": text}).json()["count"] > 40_000


def test_schemas_are_bounded(client: httpx.Client) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    refused(client.post(CHAT, json={"messages": USER, "response_format": form}))


def test_clients_choose_who_goes_first_only_where_they_may(
    load: Callable[..., LLM], client: httpx.Client
) -> None:
    body = {"messages": USER, "max_tokens": 1}
    with running(load, allow_priority=True) as server, server.client() as open_to_all:
        for priority in (-16, 0, 16):
            answer = open_to_all.post(CHAT, json=body | {"priority": priority})
            assert answer.status_code == 200
        refused(open_to_all.post(CHAT, json=body | {"priority": -17}))
    assert client.post(CHAT, json=body | {"priority": 0}).status_code == 200


def test_large_bodies_are_not_read(client: httpx.Client) -> None:
    refused(client.post(CHAT, content=b" " * (5 << 20), headers=JSON), 413)

    def chunks() -> Any:
        for _ in range(80):
            yield b" " * (1 << 16)

    refused(client.post(CHAT, content=chunks(), headers=JSON), 413)


@pytest.mark.parametrize("size", [40_000, 100_000, 200_000])
def test_large_headers_are_refused(shared: Running, size: int) -> None:
    with shared.client() as client:
        try:
            status = client.get("/health", headers={"x-long": "x" * size}).status_code
        except httpx.TransportError:  # cut off in the middle of them
            status = 400
    assert status in (400, 431)


def test_a_client_that_sends_too_much_reads_why(shared: Running) -> None:
    """Its body is read, up to a bound, before the answer comes."""
    size = 6 << 20
    with shared.connect() as connection:
        connection.sendall(f"{HEAD}content-length: {size}\r\n\r\n".encode() + b" " * size)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_chunk_that_is_too_much_may_be_the_last(load: Callable[..., LLM]) -> None:
    with running(load, max_body_bytes=300) as server, server.connect() as connection:
        body = b"190\r\n" + b" " * 0x190 + b"\r\n0\r\n\r\n"
        connection.sendall(f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed(shared: Running) -> None:
    with shared.connect() as connection:
        lengths = "content-length: 4\r\ntransfer-encoding: chunked\r\n"
        connection.sendall(f"{HEAD}{lengths}\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
        answer = b""
        while received := connection.recv(1000):  # until it is closed
            answer += received
    assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_body_is_utf_8(client: httpx.Client, encoding: str) -> None:
    """Its depth is checked before it is parsed."""
    body = json.dumps({"messages": USER}).encode(encoding)
    error = refused(client.post(CHAT, content=body, headers=JSON), 400)
    assert error["code"] == "not_utf8"


def test_a_web_page_cannot_send_what_it_likes(client: httpx.Client) -> None:
    """A form or a fetch without leave may send these types, and no others."""
    body = json.dumps({"messages": USER})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.post(CHAT, content=body, headers={"content-type": kind})
        refused(answer, 415)
        assert answer.elapsed.total_seconds() < 1.5, "nothing is waited for: the body has come"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, (400, 403)) for host in ("evil.example", "localhost.evil.example", "", "a b")),
        ("x@localhost", (400, 403)),
        *((host, (200,)) for host in ("localhost:8000", "127.0.0.1", "[::1]:9", "192.168.1.7")),
    ],
)
def test_only_its_own_names_open_the_server(
    client: httpx.Client, host: str, status: tuple[int, ...]
) -> None:
    assert client.get("/v1/models", headers={"host": host}).status_code in status


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    error = refused(client.get("/v1/nothing"), 404)
    assert "GET /v1/nothing" in error["message"]
    assert "/openapi.json" in refused(client.get(CHAT), 405)["message"]
    refused(client.delete("/v1/models"), 405)


def test_no_route_administers_anything(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/messages/count_tokens", "/v1/models", "/v1/models/{model}"),
        *("/tokenize", "/detokenize", "/tokenizer_info", "/infill"),
        *("/live", "/health", "/ready", "/version", "/metrics"),
    }
    for path in ("/docs", "/redoc", "/invocations", "/pause", "/update_weights"):
        assert client.get(path).status_code == 404


def test_an_error_repeats_no_prompt(client: httpx.Client) -> None:
    secret = "the secret of the ferry " * 500
    body = {"messages": [{"role": "user", "content": secret}], "temperature": "hot"}
    assert "secret" not in client.post(CHAT, json=body).text


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ('{"messages": [], "user": "%s"}', "messages is []"),
        ('{"messages": [{"role": "user", "content": "%s"}], "n": "x"}', "n is 'x'"),
        ('{"messages": "%s", ', "no JSON"),
        ('["%s"]', "the body must be a JSON object"),
        ('{"user": "%s", "n": ' + "1" * 5000 + "}", "thousands of digits"),
        (b'{"user": "%s\xff"}', "JSON in UTF-8"),
    ],
)
def test_large_bodies_are_checked_as_small_ones(
    client: httpx.Client, body: str | bytes, part: str
) -> None:
    """A thread reads them."""
    whole = body if isinstance(body, bytes) else body.encode()
    for size in (10, 100_000):
        answer = client.post(CHAT, content=whole.replace(b"%s", b"x" * size), headers=JSON)
        assert part in refused(answer)["message"]


def test_an_object_with_a_schema_is_bound_by_it(client: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_object", "schema": number}
    body = {"seed": 3, "temperature": 1.0, "input": USER, "text": {"format": form}}
    (said,) = client.post("/v1/responses", json=body).json()["output"][0]["content"]
    assert '"n"' in said["text"]


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
    said = refused(answer)["message"]
    assert said == (
        "response_format: grammar (json_schema) cannot be used: "
        "no text follows it, such as where a schema refers to itself alone"
    )


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


def test_long_answers_are_written_in_pieces() -> None:
    from foredraft.server.wire import JsonResponse

    value = {"a": [{"b": [0.5, "\u00e4"]}] * 130, "c": {"d": list(range(200)), "e": None}, "f": []}
    assert json.loads(JsonResponse(value).body) == value
