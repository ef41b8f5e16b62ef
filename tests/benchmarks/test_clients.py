"""Clients that load any server with OpenAI's chat interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.clients import Task, compare, serving_report
from foredraft.core.errors import ForedraftError


def test_no_prompt_comes_twice_and_every_client_has_one() -> None:
    """A server that keeps what it read would answer a prompt that comes again at once."""
    task = Task(["tea", "mill"], 8, 0.0)
    rounds = [task.in_round(number, clients) for clients in (1, 4) for number in range(3)]
    prompts = [prompt for each in rounds for prompt in each.prompts]
    assert len({*prompts}) == len(prompts)
    assert [len(each.prompts) for each in rounds] == [2, 2, 2, 4, 4, 4]
    beginnings = {prompt.partition(":")[0] for prompt in prompts}
    assert len(beginnings) == len(prompts), "they differ from the first words on"
    assert all(prompt.endswith(("tea", "mill")) for prompt in prompts)


class _Server(BaseHTTPRequestHandler):
    """Two events of text and a count, as OpenAI's servers stream them."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.headers["authorization"], body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        for chunk in (
            {"choices": [{"delta": {"content": "a"}}]},
            {"choices": [{"delta": {"content": "b"}}]},
            {"choices": [], "usage": {"completion_tokens": 7}},
        ):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_any_server_is_loaded(server: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    task = Task(["a", "b"], 4, 0.0, api_key="secret", model="m")
    figures = compare({"ours": url, "theirs": url}, [1, 2], task, rounds=1)
    rows = serving_report(figures).as_dict()["figures"]
    found = [(each["server"], each["clients"]) for each in rows]
    assert found == [("ours", 1), ("theirs", 1), ("ours", 2), ("theirs", 2)]
    keys, bodies = zip(*server.asked, strict=True)  # type: ignore[attr-defined]
    assert {*keys} == {"Bearer secret"}
    assert {body["model"] for body in bodies} == {"m"}
    assert len(bodies) == 2 * 2 * 2 * 2, "servers, rounds, numbers of clients, prompts"


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ForedraftError, match="does not answer"):
        compare({"gone": "http://127.0.0.1:9"}, [1], Task(["a"], 4, 0.0), rounds=1)
