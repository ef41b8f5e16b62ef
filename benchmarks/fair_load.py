"""Clients of four keys for a long time, one key greedy: do the others wait for it?

The same requests are asked again and again, so that each reply can be compared with the first one
to it. The fair share of a key's waiting is measured first: all keys have as many clients then.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.server_process import ServerProcess, resident_mb, served
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ForedraftError

CHAT = "/v1/chat/completions"
_KEYS = ("greedy", "first", "second", "third")
_FEW, _MANY = 4, 20
"""Clients of a key, and of the greedy one: 32 together."""
_TOPICS = ("a ferry at night", "how bread is made", "an old bridge", "maps", "rivers", "the sea")
_TURN_S = 120
_MOST_WAIT, _MOST_GROWTH = 2.0, 0.05
_CACHE = "200MB"
"""Of keys and values; ``--serve-option=--cache-memory=...`` comes after it."""


@dataclass
class FairLoad:
    """What happened.

    Attributes:
        alike, greedy: seconds to first tokens, by key, with as many clients of each key, and with
            more of one.
        statuses: of answers that were no reply.
        texts: replies by request; a second text of one request is a fault.
        differing: requests with two texts.
        memory_mb: resident memory of the server, once a second.
        replies: in all.
        idle_mb: resident memory at the end, after some time without requests.
    """

    alike: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    greedy: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    replies: int = 0
    idle_mb: float = 0.0

    @property
    def worst(self) -> float:
        """Of the keys with few clients: the 95th percentile beside a greedy one over their share,
        which is that of the keys alike."""
        share = _late([each for key in _KEYS for each in self.alike[key]])
        return max(_late(self.greedy[key]) for key in _KEYS[1:]) / share

    @property
    def growth(self) -> float:
        """Of memory, from the second quarter to the last."""
        quarter = max(1, len(self.memory_mb) // 4)
        before = statistics.median(self.memory_mb[quarter : 2 * quarter] or [1.0])
        return statistics.median(self.memory_mb[-quarter:] or [1.0]) / before - 1


def _late(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))] if seconds else 0.0


def bodies() -> Iterator[dict[str, Any]]:
    """Requests, over and over."""
    kinds = itertools.product(_TOPICS, (0, 0.8), (24, 64), range(4))
    for topic, temperature, size, number in itertools.cycle([*kinds]):
        yield {
            "messages": [{"role": "user", "content": f"Write about {topic}, number {number}."}],
            "max_tokens": size,
            "temperature": temperature,
            "seed": number,
            "stream": True,
        }


async def _client(
    client: httpx.AsyncClient,
    key: str,
    until: float,
    asked: Iterator[dict[str, Any]],
    result: FairLoad,
    waits: dict[str, list[float]],
) -> None:
    headers = {"authorization": f"Bearer key-of-{key}"}
    while time.monotonic() < until:
        body, began, text = next(asked), time.monotonic(), ""
        async with client.stream("POST", CHAT, json=body, headers=headers) as reply:
            if reply.status_code != 200:
                result.statuses.append(reply.status_code)
                continue
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                if said := choice["delta"].get("content"):
                    if not text:
                        waits[key].append(time.monotonic() - began)
                    text += said
        result.replies += 1
        name = json.dumps(body)
        if result.texts.setdefault(name, text) != text:
            result.differing.append(name)


async def _watch(pid: int | None, result: FairLoad) -> None:
    while pid is not None:
        result.memory_mb.append(resident_mb(pid))
        await asyncio.sleep(1)


async def run_load(server: ServerProcess, seconds: float) -> FairLoad:
    """A quarter of the time with keys alike, the rest with a greedy one, in turns: what else the
    machine does changes within minutes."""
    result, asked = FairLoad(), bodies()
    limits = httpx.Limits(max_connections=None)
    num_turns = max(1, int(seconds // _TURN_S))
    parts = [(0.25, result.alike, _FEW), (0.75, result.greedy, _MANY)] * num_turns
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        for share, waits, many in parts:
            until = time.monotonic() + share * seconds / num_turns
            watching = asyncio.create_task(_watch(server.pid, result))
            await asyncio.gather(
                *(
                    _client(client, key, until, asked, result, waits)
                    for key in _KEYS
                    for _ in range(many if key == "greedy" else _FEW)
                )
            )
            watching.cancel()
    return result


def fair_load(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long requests begin.")] = 30.0,
    serve_option: Annotated[
        list[str] | None,
        typer.Option(help="For the server, such as --model=DIR; may be repeated."),
    ] = None,
    idle: Annotated[float, typer.Option(min=0, help="Seconds to wait afterwards.")] = 0.0,
    output: o.Output = None,
) -> None:
    """Load a server with 32 clients of four keys, one of them greedy.

    Fails if another key waits more than twice its fair share for first tokens, if an answer is no
    reply, if a reply differs from the first one to its request, or if memory grew by more than 5 %.
    """
    check_outputs(output)
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory, "keys.txt")
        keys.write_text("".join(f"{key}:key-of-{key}\n" for key in _KEYS))
        # Small enough to be full within a minute: from then on memory has to be flat.
        small = ["--cache-memory", _CACHE]
        options = [*small, *(serve_option or ()), "--api-key-file", str(keys)]
        with served(options) as server:
            result = asyncio.run(run_load(server, 60 * minutes))
            time.sleep(idle)
            result.idle_mb = resident_mb(server.pid or os.getpid())
    _report(result, minutes).give(output)
    if result.statuses or result.differing or result.worst > _MOST_WAIT:
        raise ForedraftError(
            f"answers that were no reply: {sorted(set(result.statuses))}; differing texts: "
            f"{len(result.differing)}; waiting beside a greedy key: {result.worst:.2f} of fair"
        )
    if result.growth > _MOST_GROWTH:
        raise ForedraftError(f"memory grew by {result.growth:+.1%}")


def _report(result: FairLoad, minutes: float) -> Report:
    rows = [
        {
            "key": key,
            "load": load,
            "replies": len(waits[key]),
            "median_s": statistics.median(waits[key] or [0.0]),
            "late_s": _late(waits[key]),
            "last_s": max(waits[key], default=0.0),
        }
        for load, waits in (("alike", result.alike), ("one greedy", result.greedy))
        for key in _KEYS
    ]
    columns = {
        "load": "{load}",
        "key": "{key}",
        "replies": "{replies:d}",
        "first token, median s": "{median_s:.2f}",
        "95 %": "{late_s:.2f}",
        "last": "{last_s:.2f}",
    }
    facts = {
        "minutes": minutes,
        "replies": result.replies,
        "requests": len(result.texts),
        "no_replies": len(result.statuses),
        "differing": len(result.differing),
        "worst_of_fair": result.worst,
        "memory_growth": result.growth,
        "memory_mb": [round(each) for each in result.memory_mb[:: max(1, int(minutes))]],
        "idle_mb": result.idle_mb,
        "cores": os.cpu_count(),
    }
    memory = result.memory_mb or [0.0]
    return Report(
        [Table("first_tokens", rows, columns)],
        facts,
        [
            f"{result.replies} replies to {len(result.texts)} requests, {len(result.differing)} "
            "that differ",
            f"waiting of other keys beside a greedy one: {result.worst:.2f} of their fair share",
            f"memory: {memory[0]:.0f} to {memory[-1]:.0f} MB, {result.growth:+.1%}; "
            f"{result.idle_mb:.0f} MB when idle",
        ],
    )
