"""`foredraft bench …` on a tiny checkpoint, and against a server that answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError, ForedraftError


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_drafters_are_compared(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = bench(
        "drafters", "--model", str(checkpoint), "--dtype", "float32", "--drafters", "ngram",
        "--variant", "suffix node_cost=0.5", "--limit", "1", "--max-tokens", "4",
        "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    report = json.loads(path.read_text())
    names = {row["contender"] for row in report["overall"]}
    assert names == {"none", "ngram", "suffix node_cost=0.5"}
    assert all(trial["identical"] for trial in report["trials"])
    assert "all categories" in result.stdout


def test_steps_are_timed_beside_a_floor(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = bench(
        "step", "--model", str(checkpoint), "--dtype", "float32", "--tokens", "1,3",
        "--context", "16", "--rounds", "1", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    report = json.loads(path.read_text())
    assert {f["name"] for f in report["figures"]} == {"target", "suffix (draft)"}
    assert [*report["floor_ms"]] == ["1", "3"]


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


def test_any_server_is_loaded(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    path, url = tmp_path / "out.json", f"http://127.0.0.1:{server.server_address[1]}"
    result = bench(
        "serve", "--url", f"ours={url}/", "--url", f"theirs={url}", "--clients", "1,2", "--limit",
        "2", "--rounds", "1", "--api-key", "secret", "--model", "m", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    figures = json.loads(path.read_text())["figures"]
    found = [(each["server"], each["clients"]) for each in figures]
    assert found == [("ours", 1), ("theirs", 1), ("ours", 2), ("theirs", 2)]
    keys, bodies = zip(*server.asked, strict=True)  # type: ignore[attr-defined]
    assert {*keys} == {"Bearer secret"}
    assert {body["model"] for body in bodies} == {"m"}
    assert len(bodies) == 2 * 2 * 2 * 2, "servers, rounds, numbers of clients, prompts"


def test_a_server_that_does_not_answer_is_named() -> None:
    result = bench("serve", "--url", "http://127.0.0.1:9", "--limit", "1")
    assert isinstance(result.exception, ForedraftError)
    assert "http://127.0.0.1:9 does not answer" in str(result.exception)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ours=127.0.0.1", "=x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    assert isinstance(bench("serve", "--url", url).exception, ConfigError)
