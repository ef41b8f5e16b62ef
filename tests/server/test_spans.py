"""Spans for OpenTelemetry: numbers of a request, and nothing of what was said in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.llm import LLM
from foredraft.server.app import create_app
from foredraft.server.settings import ServerSettings
from foredraft.server.spans import RequestSpans, spans_to
from tests.server.conftest import Running, running, wait_until
from tests.server.events import data_of
from tests.server.test_lifecycle import LONG, raw_request

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the ferry at midnight " * 3}],
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def kept() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def server(
    load: Callable[..., LLM], kept: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr("foredraft.server.context.spans_to", lambda _: RequestSpans(provider))
    with running(load, served_model_names=("tiny",)) as server:
        yield server


def only(kept: InMemorySpanExporter) -> Any:
    wait_until(lambda: bool(kept.get_finished_spans()))
    [span] = kept.get_finished_spans()
    kept.clear()
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span(server: Running, kept: InMemorySpanExporter, stream: bool) -> None:
    body = BODY | {"stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    with server.client() as client:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        response = client.post(CHAT, json=body, headers={"traceparent": parent})
    answer = data_of(response)[-2] if stream else response.json()
    told = answer["metrics"]["speculative_decoding"]
    span = only(kept)
    found = dict(span.attributes)
    assert span.name == "chat tiny"
    assert f"{span.context.trace_id:032x}" in parent
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.request.max_tokens"] == found["gen_ai.usage.output_tokens"] == 60
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    seconds = (span.end_time - span.start_time) / 1e9
    assert 0 < found["gen_ai.response.time_to_first_chunk"] <= seconds
    drafted = found["foredraft.speculation.num_draft_tokens"]
    accepted = found["foredraft.speculation.num_accepted_tokens"]
    assert (drafted, accepted) == (told["num_draft_tokens"], told["num_accepted_draft_tokens"])
    assert accepted + found["foredraft.speculation.num_steps"] >= 60
    assert "ferry" not in span.to_json()
    assert response.text
    assert span.status.is_ok or span.status.status_code.name == "UNSET"


def test_completions_of_several_prompts_are_one_span(
    server: Running, kept: InMemorySpanExporter
) -> None:
    with server.client() as client:
        body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "n": 2, "ignore_eos": True}
        client.post("/v1/completions", json=body)
    found = dict(only(kept).attributes)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.usage.input_tokens"] == 5
    assert found["gen_ai.usage.output_tokens"] == 16
    assert found["gen_ai.response.finish_reasons"] == ("length",) * 4


def test_a_span_says_how_a_request_failed(server: Running, kept: InMemorySpanExporter) -> None:
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": [5] * 5000})
    span = only(kept)
    assert span.status.status_code.name == "ERROR"
    assert span.attributes["error.type"] == "PromptError"
    connection = raw_request(server, LONG | {"stream": True})
    wait_until(lambda: server.context.engine.stats().running > 0)
    connection.close()
    assert only(kept).attributes["error.type"] == "client_disconnected"


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Something that takes what an exporter sends."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/v1/traces", received
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def test_spans_reach_their_collector_and_prompts_do_not(load: Callable[..., LLM]) -> None:
    with collector() as (endpoint, received):
        with running(load, otlp_traces_endpoint=endpoint) as server, server.client() as client:
            assert client.post(CHAT, json=BODY).status_code == 200
        sent = b"".join(received)  # what waits is sent when the server ends
    assert b"gen_ai.usage.output_tokens" in sent
    assert b"service.name" in sent
    assert b"ferry" not in sent


def test_what_cannot_be_sent_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = ServerSettings(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces")
    with pytest.raises(ConfigError, match=r"pip install 'foredraft\[otel\]'"):
        create_app(lambda _: None, settings)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="otlp_traces_endpoint"):
        ServerSettings(otlp_traces_endpoint="collector:4317")
    assert spans_to(None)._tracer is None
