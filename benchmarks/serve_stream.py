"""Cost of streaming over HTTP: the same replies by an engine itself, and through its server.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from benchmarks.clients import CHAT, SEED, Task, request_body
from benchmarks.course import Limit, Prompts, loading
from foredraft.bench.prompts import load_prompts
from foredraft.bench.report import Report, check_outputs
from foredraft.cli import options as o
from foredraft.cli.display import progress_bar
from foredraft.core.errors import ForedraftError
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions

if TYPE_CHECKING:  # the client's process loads no model
    from foredraft.llm import LLM

_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_CODE = "from benchmarks.serve_stream import be_client; be_client()"


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


@dataclass(frozen=True)
class _Took:
    """One reply, or several."""

    num_tokens: int
    seconds: float

    @classmethod
    def of_all(cls, replies: Sequence[_Took]) -> _Took:
        return cls(sum(each.num_tokens for each in replies), sum(each.seconds for each in replies))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def measure_streaming(
    llm: LLM, task: Task, rounds: int, advance: Callable[[str], None]
) -> StreamingFigure:
    """Let engine and server answer each prompt in turns; the first round is to warm up.

    They change places with every prompt: a machine that grows slower favours neither.

    Raises:
        ForedraftError: the server does not start, or does not answer.
    """
    engine: list[float] = []
    server: list[float] = []
    with _serving(llm) as url, _Client(url, task) as client:
        sides: tuple[Callable[[int], _Took], ...] = (_Engine(llm, task).reply, client.reply)
        for number in range(rounds + 1):
            took: tuple[list[_Took], ...] = ([], [])
            for place in range(len(task.prompts)):
                first = (number + place) % 2
                for side in (first, 1 - first):
                    took[side].append(sides[side](place))
            engine.append(_Took.of_all(took[0]).tokens_per_s)
            server.append(_Took.of_all(took[1]).tokens_per_s)
            advance(f"round {number}")
    added = [own / served - 1 for own, served in zip(engine[1:], server[1:], strict=True)]
    return StreamingFigure(
        statistics.median(engine[1:]),
        statistics.median(server[1:]),
        statistics.median(added),
        tuple(added),
    )


class _Engine:
    """Reads events from the engine itself."""

    def __init__(self, llm: LLM, task: Task) -> None:
        self._llm, self._prompts = llm, task.prompts
        self._params = SamplingParams(
            max_tokens=task.max_tokens, temperature=task.temperature, seed=SEED
        )

    def reply(self, place: int) -> _Took:
        num_tokens, began = 0, time.perf_counter()
        message = {"role": "user", "content": self._prompts[place]}
        for event in self._llm.stream_chat([message], self._params):
            num_tokens += len(event.token_ids)
        return _Took(num_tokens, time.perf_counter() - began)


class _Client:
    """Has events read through the server, by one process that goes on from reply to reply."""

    def __init__(self, url: str, task: Task) -> None:
        self._told = json.dumps({"url": url, "task": asdict(task)})

    def __enter__(self) -> _Client:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._tell(self._told)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    def reply(self, place: int) -> _Took:
        """
        Raises:
            ForedraftError: there was none.
        """
        assert self._process.stdout is not None
        self._tell(str(place))
        if line := self._process.stdout.readline():
            return _Took(**json.loads(line))
        raise ForedraftError(f"the client failed: {self._last_words()}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ForedraftError(f"the client failed: {self._last_words()}") from None

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.read().strip().rpartition("\n")[2]


def be_client() -> None:
    """The client's process: answers each prompt's number with the time of its reply.

    It reads and keeps bytes, and no more: what a client makes of them is its own time.
    """
    told = json.loads(sys.stdin.readline())
    task, url = Task(**told["task"]), urlsplit(told["url"])
    for line in sys.stdin:
        began = time.perf_counter()
        body = request_body(task.prompts[int(line)], task)
        reply = _reply(url.hostname, url.port, body)
        took = _Took(int(_TOKENS.findall(reply)[-1]), time.perf_counter() - began)
        sys.stdout.write(json.dumps(asdict(took)) + "\n")
        sys.stdout.flush()


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
    from foredraft.server.run import bind, new_server
    from foredraft.server.settings import local_settings

    loaded, settings = threading.Event(), local_settings(port=0)
    app = create_app(
        lambda steps: llm.with_drafter(llm.options, trace=steps),
        settings,
        lambda context: loaded.set(),
    )
    server, listening = new_server(app), bind(settings)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        loaded.wait()
        if app.state.context.failure is not None:
            raise ForedraftError(f"the server did not start: {app.state.context.failure}")
        yield settings.address(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


@o.with_options
def serve_stream(
    load: Annotated[LoadOptions, loading()],
    prompts: Prompts = None,
    limit: Limit = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, after one to warm up.")] = 5,
    output: o.Output = None,
) -> None:
    """Tokens a second of one client through the server, beside the engine's own.

    Two engines on one loaded model take turns at each prompt: one is read in this process, the
    other by a client in another process, through the server.
    """
    check_outputs(output)
    texts = [prompt.text for prompt in load_prompts(prompts, limit)]
    llm = o.load_llm(load)
    with progress_bar(rounds + 1) as advance:
        task = Task(texts, max_tokens, temperature)
        figure = measure_streaming(llm, task, rounds, advance)
    line = (
        f"the engine {figure.engine_tokens_per_s:.1f} tokens/s, through the server "
        f"{figure.served_tokens_per_s:.1f}: streaming adds {figure.added:.1%} "
        f"({min(figure.rounds):.1%} to {max(figure.rounds):.1%} in {rounds} rounds)"
    )
    by_round = [{"added": added} for added in figure.rounds]
    facts = {"drafter": llm.drafter_name, **asdict(figure), "rounds": by_round}
    Report(facts=facts, lines=[line], seed=SEED).give(output)
