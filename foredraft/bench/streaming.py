"""What streaming over HTTP adds: the same replies by an engine itself, and through its server.

Both engines stand on one loaded target, so that nothing but the way of the tokens differs. The
server runs in this process, as `foredraft serve` has it, and its client in another.
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from foredraft.bench.serve_clients import CHAT, SEED, Asked, request_body
from foredraft.core.errors import ForedraftError
from foredraft.core.params import SamplingParams

if TYPE_CHECKING:  # the client's process loads no model
    from foredraft.llm import LLM

_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_CODE = "from foredraft.bench.streaming import be_client; be_client()"


@dataclass(frozen=True)
class StreamingFigure:
    """One client, one request after the other.

    Attributes:
        engine_tokens_per_s: events read from the engine itself, median of rounds.
        served_tokens_per_s: events read through the server.
        added: share of time that streaming adds, median of rounds.
        rounds: that share in each round.
    """

    engine_tokens_per_s: float
    served_tokens_per_s: float
    added: float
    rounds: tuple[float, ...]


def measure_streaming(
    llm: LLM, asked: Asked, rounds: int, advance: Callable[[str], None]
) -> StreamingFigure:
    """Let engine and server answer in turns; the first round is to warm up.

    Raises:
        ForedraftError: the server does not start, or does not answer.
    """
    engine: list[float] = []
    server: list[float] = []

    def by_engine() -> None:
        engine.append(_by_engine(llm, asked))
        advance("engine")

    def by_client(url: str) -> None:
        server.append(_by_client(url, asked))
        advance("server")

    with _serving(llm) as url:
        for _ in range(rounds + 1):
            by_engine()
            by_client(url)
    added = [own / served - 1 for own, served in zip(engine[1:], server[1:], strict=True)]
    return StreamingFigure(
        statistics.median(engine[1:]),
        statistics.median(server[1:]),
        statistics.median(added),
        tuple(added),
    )


def _by_engine(llm: LLM, asked: Asked) -> float:
    """Tokens a second."""
    params = SamplingParams(max_tokens=asked.max_tokens, temperature=asked.temperature, seed=SEED)
    num_tokens, began = 0, time.perf_counter()
    for prompt in asked.prompts:
        for event in llm.stream_chat([{"role": "user", "content": prompt}], params):
            num_tokens += len(event.token_ids)
    return num_tokens / (time.perf_counter() - began)


def _by_client(url: str, asked: Asked) -> float:
    """Tokens a second."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=json.dumps({"url": url, "asked": asdict(asked)}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ForedraftError(f"the client failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def be_client() -> None:
    """What the client's process runs: answers with the tokens a second that it saw.

    It reads and keeps bytes, and no more: what a client makes of them is its own time.
    """
    told = json.load(sys.stdin)
    asked, url = Asked(**told["asked"]), urlsplit(told["url"])
    replies, began = list[bytes](), time.perf_counter()
    for prompt in asked.prompts:
        replies.append(_reply(url.hostname, url.port, request_body(prompt, asked)))
    seconds = time.perf_counter() - began
    num_tokens = sum(int(_TOKENS.findall(reply)[-1]) for reply in replies)
    sys.stdout.write(str(num_tokens / seconds))


def _reply(host: str | None, port: int | None, body: Mapping[str, Any]) -> bytes:
    """All that the server sends, headers included."""
    content = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    with socket.create_connection((host, port)) as connection:
        connection.sendall(head.encode() + content)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@contextmanager
def _serving(llm: LLM) -> Iterator[str]:
    """A server for the loaded model, on a thread of its own; its address.

    Raises:
        ForedraftError: it does not start.
    """
    from foredraft.server.app import create_app
    from foredraft.server.in_process import local_settings
    from foredraft.server.serving import new_server

    loaded, listens = threading.Event(), Future[str]()
    app = create_app(
        lambda steps: llm.with_drafter(llm.options, trace=steps),
        local_settings(port=0),
        lambda context: loaded.set(),
    )
    server = new_server(app)
    server.when_listening(listens.set_result)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        loaded.wait()
        if app.state.context.failure is not None:
            raise ForedraftError(f"the server did not start: {app.state.context.failure}")
        yield listens.result(60)
    finally:
        server.should_exit = True
        thread.join()
