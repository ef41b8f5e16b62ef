"""Clients that leave, never read or come too late; loading and draining."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serve_load import run_load
from benchmarks.server_process import ServerProcess
from foredraft.audit.faults import FAULTS
from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.engine.request import Event
from foredraft.llm import LLM
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel
from foredraft.models.text.grammars import Grammars
from foredraft.options import LoadOptions
from foredraft.server.generation import Generation, GenerationRequest
from foredraft.server.run import bind
from foredraft.server.settings import ServerSettings
from tests.models.checkpoints import VOCAB_SIZE
from tests.page.conftest import tiny  # noqa: F401
from tests.server.conftest import Running, free_port, loading, running, wait_until
from tests.server.events import data_of

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LONG: dict[str, Any] = {"messages": USER, "max_tokens": 4000, "ignore_eos": True, "seed": 1}


def raw_request(server: Running, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent."""
    connection = server.connect()
    connection.sendall(request_bytes(body))
    return connection


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(
    shared: Running, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    connection = raw_request(shared, LONG | {"stream": stream})
    wait_until(lambda: shared.context.engine.stats().running > 0)
    before = shared.context.engine.stats().committed
    connection.close()
    wait_until(shared.is_idle)
    assert shared.context.engine.stats().committed - before < 3000
    time.sleep(0.1)
    assert "Traceback" not in caplog.text, "clients leave; that is no fault of the server"


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_a_client_no_longer_waits_for_is_not_compiled(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    go_on, begun, compile_now = threading.Event(), list[str](), Grammars._compile

    def compile_slowly(self: Grammars, grammar: Grammar) -> Any:
        begun.append(grammar.source)
        assert go_on.wait(20)
        return compile_now(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_slowly)
    with running(load) as server, server.client() as client:
        connections = list[socket.socket]()
        for number in range(4):
            rule = {"structured_outputs": {"regex": f"a{number}"}}
            connections.append(raw_request(server, LONG | rule | {"stream": stream}))
            wait_until(lambda: sum(server.context._num_live_of.values()) == len(connections))
        wait_until(lambda: len(begun) == 2)
        for connection in connections:
            connection.close()
        wait_until(lambda: not server.context._num_live_of)
        go_on.set()
        rule = {"structured_outputs": {"regex": "b"}}
        answer = client.post(CHAT, json={"messages": USER} | rule)
        assert answer.json()["choices"][0]["message"]["content"] == "b"
    assert sorted(begun) == ["a0", "a1", "b"]


class SlowTarget(TableModel):
    """Takes its time, and counts the steps."""

    steps, seconds = 0, 0.2

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        time.sleep(self.seconds)
        self.steps += 1
        return super().score(rows, taps)


class GatedTarget(TableModel):
    """Does as many steps as it is let."""

    steps, gate = 0, threading.Semaphore(0)

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        assert self.gate.acquire(timeout=60)
        self.steps += 1
        return super().score(rows, taps)


@pytest.mark.parametrize("stream", [False, True])
def test_within_one_step(tokenizer_directory: Path, stream: bool) -> None:
    """The step that is under way when a client leaves is the last one of its request."""
    target = GatedTarget.random(VOCAB_SIZE, seed=5)
    target.gate = threading.Semaphore(3)
    with running(loading(target, tokenizer_directory)) as server:
        connection = raw_request(server, LONG | {"stream": stream})
        wait_until(lambda: target.steps > 2)
        connection.close()
        wait_until(lambda: not server.context.num_live)
        target.gate.release(4000)
        wait_until(server.is_idle)
        assert target.steps - 3 <= 1
        time.sleep(0.3)
        assert target.steps - 3 <= 1
        text = server.context.metrics.render().decode()
        assert "foredraft:request_aborted_total 1.0" in text


def test_a_client_that_never_reads_is_cut_off(
    load: Callable[..., LLM], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.server.run._SEND_BUFFER", 8192)  # it is full sooner
    with running(load, send_timeout=0.3, max_batch_size=8) as server:
        connections = []
        for _ in range(2):
            connection = raw_request(
                server, LONG | {"stream": True, "n": 8, "logprobs": False, "seed": 2}
            )
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connections.append(connection)
        wait_until(lambda: server.context.engine.stats().running > 0)
        wait_until(server.is_idle, 120)
        for connection in connections:
            connection.close()
    for text in ("Traceback", "without completing"):
        assert text not in caplog.text


@pytest.mark.parametrize("asked_before", [False, True], ids=["at once", "after a request"])
def test_headers_that_never_end(load: Callable[..., LLM], asked_before: bool) -> None:
    seconds = 1.0 if asked_before else 0.3  # the first request must come in time
    with running(load, header_timeout=seconds) as server, server.connect() as connection:
        if asked_before:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            reply = b""
            while not reply.endswith(b"}"):
                reply += connection.recv(1000)
        connection.sendall(b"GET /health HTTP/1.1\r\nx-slow: ")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""


def test_a_body_that_never_ends(load: Callable[..., LLM]) -> None:
    with running(load, body_timeout=0.3) as server, server.connect() as connection:
        connection.sendall(f"{HEAD}content-length: 100\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_a_full_queue_says_when_to_come_again(load: Callable[..., LLM]) -> None:
    with (
        running(partial(load, max_batch_size=1), max_waiting=1) as server,
        server.client() as client,
    ):
        connections = [raw_request(server, LONG | {"stream": True}) for _ in range(2)]
        wait_until(lambda: server.context.num_live == 2)
        response = client.post(CHAT, json=LONG)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        for connection in connections:
            connection.close()
        wait_until(lambda: client.post(CHAT, json=LONG | {"max_tokens": 1}).status_code == 200)


def test_connections_beyond_the_limit(load: Callable[..., LLM]) -> None:
    with running(load, max_connections=2) as server:
        idle = [server.connect() for _ in range(2)]
        wait_until(lambda: len(server.server.server_state.connections) == 2)
        with server.client() as client:
            response = client.post(CHAT, json=LONG)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["code"] == "too_many_connections"
            assert client.get("/health").status_code == 200, "a restart would help nothing"
        for connection in idle:
            connection.close()
        wait_until(lambda: not server.server.server_state.connections)
        with server.client() as client:
            assert client.post(CHAT, json=LONG | {"max_tokens": 1}).status_code == 200


def test_a_reply_that_takes_too_long_keeps_its_text(load: Callable[..., LLM]) -> None:
    with running(load, request_timeout=0.3) as server, server.client() as client:
        events = data_of(client.post(CHAT, json=LONG | {"stream": True}))
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        whole = client.post(CHAT, json=LONG)
        assert whole.status_code == 200
        reply = whole.json()["choices"][0]
        assert reply["finish_reason"] == "length"
        assert reply["message"]["content"]
        wait_until(server.is_idle)


def test_the_time_of_others_does_not_count(tokenizer_directory: Path) -> None:
    """The last of three replies that run one by one begins after more than the time of one."""
    target = SlowTarget.random(VOCAB_SIZE, seed=5)
    target.seconds = 0.02
    load = loading(target, tokenizer_directory, max_batch_size=1, drafter="none")
    with (
        running(load, request_timeout=0.3) as server,
        server.client() as client,
        ThreadPoolExecutor(3) as threads,
    ):
        began = time.monotonic()
        answers = [*threads.map(lambda _: client.post(CHAT, json=LONG), range(3))]
        assert time.monotonic() - began > 3 * 0.3
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]


class LongPrompt:
    """The events of a reply whose prompt is read in parts."""

    request_ids = (7,)

    def __init__(self, read: Callable[[], None]) -> None:
        self._events = self._all(read)

    async def _all(self, read: Callable[[], None]) -> AsyncIterator[Event]:
        for num_read in (400, 800, 900, 1000):
            read()
            yield Event(7, (5,) if num_read == 1000 else (), 0, (), num_read)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def cut(self) -> None: ...

    async def aclose(self) -> None: ...


async def read_slowly(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> AsyncIterator[tuple[float, Generation]]:
    """The time and the generation after each part of a prompt, which takes these seconds."""
    now = 100.0

    def read() -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    prompts, params = ([5] * 1000,), SamplingParams(max_tokens=9)
    request = GenerationRequest("chat", "tiny", prompts, params, None, 0, None, arrived=now)
    events = aiter(generation := Generation(LongPrompt(read), request))
    for _ in range(4):
        await anext(events)
        yield now, generation


@pytest.mark.anyio
async def test_time_counts_from_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    times, began = [], 0.0
    async for began, generation in read_slowly(monkeypatch, 40.0):
        times.append(generation.timed_from(num_steps=0) - began)
    assert times == [0.0] * 4
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
    assert generation.timed_from(num_steps=9) == began


@pytest.mark.anyio
async def test_without_progress_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async for began, generation in read_slowly(monkeypatch, 40.0):
        assert generation.timed_from(num_steps=3) == began
        monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
        assert generation.timed_from(num_steps=3) == began, "the engine stands still"
        assert generation.timed_from(num_steps=4) == 1000.0, "it works for others"
        break


@pytest.mark.anyio
@pytest.mark.parametrize(("seconds", "num_lines"), [(1.0, 0), (6.0, 2)])
async def test_the_log_tells_of_a_prompt_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    num_lines: int,
) -> None:
    caplog.set_level(logging.INFO, "foredraft.server.reading")
    async for _ in read_slowly(monkeypatch, seconds):
        pass
    said = ["800 of 1000 tokens of the prompt are read, 12 s", "1000 of 1000", "24 s"]
    assert len(caplog.records) == num_lines
    assert all((each in caplog.text) is bool(num_lines) for each in said)


def test_a_reply_that_never_begins_ends_with_an_error(tokenizer_directory: Path) -> None:
    target = SlowTarget.random(VOCAB_SIZE, seed=5)
    load = loading(target, tokenizer_directory, max_batch_size=1, drafter="none")
    with running(load, request_timeout=0.1) as server, server.client() as client:
        first = raw_request(server, LONG | {"stream": True})
        wait_until(lambda: server.context.num_live == 1)
        late = client.post(CHAT, json=LONG)  # while the first step takes its time
        assert late.status_code == 408
        assert late.headers["x-should-retry"] == "false"
        first.close()


def is_there(client: httpx.Client) -> bool:
    """Whether a server answers."""
    with contextlib.suppress(httpx.TransportError):
        return client.get("/live").status_code == 200
    return False


def test_while_the_model_is_loaded(load: Callable[..., LLM]) -> None:
    may_load, answers = threading.Event(), []

    def slow(trace: Any) -> LLM:
        may_load.wait(20)
        return load(trace)

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, timeout=20) as client:
            wait_until(lambda: is_there(client))
            answers.extend(client.get(f"/{p}").status_code for p in ("live", "health", "ready"))
            answers.append(client.post(CHAT, json=LONG).status_code)
        may_load.set()

    port = free_port()
    asking = threading.Thread(target=ask, args=(f"http://127.0.0.1:{port}",))
    asking.start()
    with running(slow, port=port):
        asking.join()
    assert answers == [200, 503, 503, 503]


SERVES_SLOWLY = """
import sys, time
from foredraft.cli import serve
from foredraft.server.settings import ServerSettings
print("begins", flush=True)
serve._run(lambda feed: time.sleep(60), ServerSettings(port=int(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("sent", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, -15)],
)
def test_a_signal_ends_a_server_that_loads(sent: signal.Signals, code: int) -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", SERVES_SLOWLY, str(port)], stderr=subprocess.PIPE
    ) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            wait_until(lambda: is_there(client))
        process.send_signal(sent)
        assert process.wait(20) == code  # neither loaded (60 s) nor drained (30)


def test_a_taken_port_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            bind(ServerSettings(port=port))


def test_draining_lets_replies_end_and_takes_no_more(load: Callable[..., LLM]) -> None:
    with running(load, drain_timeout=20.0) as server, server.client() as client:
        with client.stream("POST", CHAT, json=LONG | {"stream": True, "max_tokens": 1500}) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.loop.call_soon_threadsafe(server.server.end)
            wait_until(lambda: not server.context.is_ready)
            with server.client() as other:
                assert other.get("/health").status_code == 200
                assert other.get("/ready").status_code == 503
                refused = other.post(CHAT, json=LONG)
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
            assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
        server.thread.join(20)
        assert not server.thread.is_alive()


@pytest.mark.parametrize(("drain_timeout", "asked"), [(0.2, 1), (60.0, 2)], ids=["late", "twice"])
def test_what_does_not_end_in_time_ends_with_an_error(
    load: Callable[..., LLM], drain_timeout: float, asked: int
) -> None:
    with running(load, drain_timeout=drain_timeout) as server, server.client() as client:
        with client.stream("POST", CHAT, json=LONG | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            for _ in range(asked):
                server.loop.call_soon_threadsafe(server.server.end)
            last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"


def test_silent_streams_are_kept_open(load: Callable[..., LLM]) -> None:
    with (
        running(partial(load, max_batch_size=1), ping_interval=0.05) as server,
        server.client() as client,
    ):
        first = raw_request(server, LONG | {"stream": True})
        wait_until(lambda: server.context.num_live == 1)
        with client.stream("POST", CHAT, json=LONG | {"stream": True}) as waiting:
            lines = waiting.iter_lines()
            assert any(line.startswith(": ping") for line in lines)
            # After an id, the SDKs of OpenAI and Anthropic read an empty line as an event.
            assert next(lines)
        first.close()


def test_a_model_that_cannot_be_loaded(load: Callable[..., LLM]) -> None:
    def failing(trace: Any) -> LLM:
        raise ValueError("no such weights")

    with running(failing) as server, server.client() as client:
        assert client.get("/health").status_code == 503
        assert client.post(CHAT, json=LONG).status_code == 503
        assert isinstance(server.context.failure, ValueError)


def test_clients_read_leave_and_are_malformed(shared: Running) -> None:
    result = asyncio.run(run_load(ServerProcess(shared.url), streams=6, seconds=0.3, seed=1))
    assert not result.faults
    assert result.is_idle
    assert result.outcomes["reads: complete"] > 0
    assert result.outcomes["malformed: 400"] > 0
    assert result.tokens > 0


ACCEPT_ALL = next(fault for fault in FAULTS if fault.name == "accept all")
ASKED = {"prompt": "the ferry and the ferry and the ferry", "max_tokens": 160, "seed": 3}


def figures(client: Any) -> tuple[float, float]:
    text = client.get("/metrics").text
    steps, differences = (
        float(re.search(rf"^foredraft:proof_{name}_total (\S+)$", text, re.M)[1])  # type: ignore[index]
        for name in ("steps", "differences")
    )
    return steps, differences


@pytest.mark.parametrize("is_faulty", [False, True], ids=["exact", "faulty"])
def test_metrics_and_page_count_proofs_and_differences(
    tiny: LLM,  # noqa: F811
    is_faulty: bool,
) -> None:
    target = TableModel.random(tiny.target.vocab_size, seed=5, order=1, sharpness=6.0)
    llm = LLM(target, tiny.tokenizer, LoadOptions(drafter="suffix"))
    if is_faulty:
        llm.policy.rule = ACCEPT_ALL.rule
    with running(lambda feed: llm, prove_every=1) as server, server.client() as client:
        client.post("/v1/completions", json={**ASKED, "temperature": 1.0}).raise_for_status()
        wait_until(lambda: figures(client)[0] >= 3)
        wait_until(lambda: llm.engine.num_live == 0)
        steps, differences = figures(client)
        told = client.get("/page/info").json()["proof"]
    assert bool(differences) is is_faulty
    assert differences <= steps
    assert told["every"] == 1
    assert bool(told["differences"]) is is_faulty


def test_the_first_token_counts_from_the_arrival_of_the_request(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template, a tokenizer or a grammar that takes long is not left out."""
    with running(load) as server, server.client() as client:
        tokenizer = server.context.tokenizer
        encode = tokenizer.encode_chat

        def slowly(*given: Any) -> list[int]:
            time.sleep(0.3)
            return encode(*given)

        monkeypatch.setattr(tokenizer, "encode_chat", slowly)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        client.post("/v1/chat/completions", json=body)
        lines = client.get("/metrics").text.splitlines()
    sums = [line for line in lines if line.startswith("foredraft:time_to_first_token_seconds_sum")]
    assert float(sums[0].split()[-1]) > 0.3
