"""Longest gap of a stream while another client sends something large."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from benchmarks.server_process import served
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o

_WARM = 2.0
"""Seconds of a stream before, and between, what others send."""
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_WORDS = "The ferry left the harbour before sunrise, and nobody on the quay waved. "


@dataclass(frozen=True)
class Stall:
    """Gaps of a stream beside one kind of request.

    Attributes:
        status: of the answer to that request.
        seconds: that it took.
        longest_ms: the longest gap between two events meanwhile.
        usual_ms: the median gap of the stream while it was alone.
        alone_ms: its longest gap then, in as many seconds or in `_WARM`.
    """

    status: int
    seconds: float
    longest_ms: float
    usual_ms: float
    alone_ms: float


def requests() -> dict[str, tuple[str, dict[str, Any]]]:
    """What is sent beside the stream: a path and a body each."""
    size = 3_900_000
    text = _WORDS * (size // len(_WORDS))
    parts = [{"type": "text", "text": _WORDS} for _ in range(size // (len(_WORDS) + 28))]
    wide = {f"property_{i}": {"type": "integer"} for i in range(800)}
    schema = {"type": "object", "properties": wide, "required": [*wide]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    small = {"max_tokens": 8, "temperature": 0}

    def user(content: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content}]

    wide_form = {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema}}
    short = user("Describe a ferry.")
    return {
        "text of 4 MB": (_CHAT, {"messages": user(text), **small}),
        "text of 4 MB in parts": (_CHAT, {"messages": user(parts), **small}),
        "4 MB of token ids": (_COMPLETIONS, {"prompt": [7] * (size // 3), **small}),
        "text of 4 MB to be counted": ("/v1/messages/count_tokens", {"messages": user(text)}),
        "text of 4 MB to tokens": ("/tokenize", {"prompt": text}),
        "a million fields": (
            _CHAT,
            {"messages": short, **{str(i): 0 for i in range(300_000)}, **small},
        ),
        "schema of 800 properties": (
            _CHAT,
            {"messages": short, "response_format": wide_form, **small},
        ),
        "tool of 800 properties": (
            *(_CHAT,),
            {"messages": short, "tools": [tool], "tool_choice": "required", **small},
        ),
        "20 alternatives of each token": (
            *(_CHAT,),
            {
                "messages": short,
                "max_tokens": 1500,
                "ignore_eos": True,
                "logprobs": True,
                "top_logprobs": 20,
            },
        ),
        # Above 100 ms by intent: a step scores 64 tokens of a prompt, each with all of the
        # vocabulary; with fewer a step the weights would be read more often.
        "scores of a long prompt": (
            *(_COMPLETIONS,),
            {"prompt": text[:25_000], "max_tokens": 1, "echo": True, "logprobs": 5, "stream": True},
        ),
    }


def be_reader() -> None:
    """Read one reply after the other, and print when events come; runs in a process of its own."""
    body = {
        "messages": [{"role": "user", "content": "Tell me a story about a ferry."}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "temperature": 1,
    }
    with httpx.Client(base_url=sys.argv[1], timeout=600) as client:
        while True:
            with client.stream("POST", _CHAT, json=body) as answer:
                for line in answer.iter_lines():
                    if line:
                        typer.echo(time.perf_counter())
            typer.echo("nan")  # the time to the next reply's beginning is no gap


class Stream:
    """A reply after the other, read by a process of its own: this one sends large bodies.

    Attributes:
        times: when events came.
    """

    def __init__(self, url: str) -> None:
        self.times: list[float] = []
        code = "from benchmarks.stalls import be_reader; be_reader()"
        command = [sys.executable, "-c", code, url]
        self._reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        while len(self.times) < 10 and self._reader.poll() is None:  # a busy machine begins late
            time.sleep(0.1)

    def _read(self) -> None:
        assert self._reader.stdout is not None
        for line in self._reader.stdout:
            self.times.append(float(line))

    def longest(self, since: float) -> float:
        """Milliseconds."""
        return max(self._gaps(since))

    def usual(self, since: float) -> float:
        """Milliseconds."""
        return statistics.median(self._gaps(since))

    def _gaps(self, since: float) -> list[float]:
        time.sleep(0.1)  # until what has come is here
        times = [since] + [each for each in self.times if not each < since]
        gaps = (1e3 * (b - a) for a, b in itertools.pairwise(times))
        return [gap for gap in gaps if gap == gap]

    def end(self) -> None:
        self._reader.kill()


def measure(url: str, kinds: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Stall]:
    """The stream's gaps beside each kind of request."""
    stream, found = Stream(url), dict[str, Stall]()
    with httpx.Client(base_url=url, timeout=600) as client:
        for name, (path, body) in kinds.items():
            content = json.dumps(body)
            before = time.perf_counter()
            time.sleep(_WARM)
            usual, alone = stream.usual(before), stream.longest(before)
            began = time.perf_counter()
            answer = client.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            found[name] = Stall(
                *(answer.status_code, time.perf_counter() - began, stream.longest(began)),
                *(usual, alone),
            )
    stream.end()
    return found


def stalls(
    model: Annotated[str | None, typer.Option(help="The default one by default.")] = None,
    output: o.Output = None,
) -> None:
    """Longest gap of a stream while another client sends what is large."""
    check_outputs(output)
    with served([] if model is None else ["--model", model]) as process:
        found = measure(process.url, requests())
    columns = {
        "beside": "{beside}",
        "answer": "{status:d}",
        "after s": "{seconds:.2f}",
        "longest gap, ms": "{longest_ms:.0f}",
        "alone, ms": "{alone_ms:.0f}",
        "median alone, ms": "{usual_ms:.0f}",
    }
    rows = [{"beside": name, **vars(each)} for name, each in found.items()]
    Report([Table("gaps", rows, columns)]).give(output)
