"""Many clients at once, of whom some behave badly: does the server stand it?

A third of the streams leave at random, some never read, some send what is malformed. Well-behaved
clients must get a whole reply or an explicit error, never a cut or a 5xx; afterwards the engine
must be idle and memory as before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer

from benchmarks.server_process import ServerProcess, engines_of, resident_mb, served
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ForedraftError

CHAT = "/v1/chat/completions"
_KINDS = ("reads", "leaves", "reads", "reads", "leaves", "malformed", "reads", "leaves", "stalls")
_TOPICS = ("rivers", "the sea", "a ferry at night", "how bread is made", "an old bridge", "maps")
_MALFORMED = (b"{", b"[]", b'{"messages": 3}', b'{"messages": [], "n": 1e9}', b"\xff" * 100)
_IDLE_SECONDS = 60.0


@dataclass
class LoadResult:
    """What happened.

    Attributes:
        outcomes: (kind of client, how it ended) to how often.
        faults: what a well-behaved client must never see.
        memory_mb: resident memory of the server, once a second.
        idle: gauges of the engine at the end.
        tokens: generated for clients that read.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def memory_growth(self) -> float:
        """Median memory of the last quarter over that of the second, less 1."""
        quarter = len(self.memory_mb) // 4
        if not quarter:
            return 0.0
        before = statistics.median(self.memory_mb[quarter : 2 * quarter])
        return statistics.median(self.memory_mb[-quarter:]) / before - 1

    @property
    def is_idle(self) -> bool:
        return not any(self.idle.values())


async def run_load(
    server: ServerProcess,
    streams: int,
    seconds: float,
    seed: int,
    kill_every: float | None = None,
) -> LoadResult:
    """Keep so many clients busy for so long.

    Args:
        streams: clients at a time.
        seconds: how long new requests begin.
        kill_every: seconds after which an engine of the server's cluster is killed; None: never.
    """
    result, began = LoadResult(), time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        until = began + seconds
        watching = asyncio.create_task(_watch_memory(server.pid, result))
        killing = asyncio.create_task(_kill(server.pid, kill_every, random.Random(seed), result))
        rngs = [random.Random(f"{seed}/{number}") for number in range(streams)]
        await asyncio.gather(
            *(
                _client(client, server.url, number, until, rng, result)
                for number, rng in enumerate(rngs)
            )
        )
        result.seconds = time.monotonic() - began
        watching.cancel()
        killing.cancel()
        await _wait_until_idle(client, result)
    return result


async def _watch_memory(pid: int | None, result: LoadResult) -> None:
    while pid is not None:
        result.memory_mb.append(resident_mb(pid))
        await asyncio.sleep(1)


async def _kill(
    pid: int | None, seconds: float | None, rng: random.Random, result: LoadResult
) -> None:
    while pid is not None and seconds is not None:
        await asyncio.sleep(seconds)
        if engines := engines_of(pid):
            os.kill(rng.choice(engines), signal.SIGKILL)
            result.outcomes["engine: killed"] += 1


async def _client(
    client: httpx.AsyncClient,
    url: str,
    number: int,
    until: float,
    rng: random.Random,
    result: LoadResult,
) -> None:
    """One client after another, of one kind; at least one."""
    kind, is_over = _KINDS[number % len(_KINDS)], False
    while not is_over:
        try:
            if kind == "malformed":
                outcome = await _malformed(client, rng)
                await asyncio.sleep(0.1)
            elif kind == "stalls":
                outcome = await _stalls(url, rng)
            else:
                outcome = await _reads(client, rng, kind == "leaves", result)
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        result.outcomes[f"{kind}: {outcome}"] += 1
        if not _is_good(kind, outcome):
            result.faults.append(f"{kind}: {outcome}")
        is_over = time.monotonic() >= until


def _is_good(kind: str, outcome: str) -> bool:
    if kind == "malformed":
        return outcome == "400"
    return outcome in ("complete", "left", "stalled", "429", "error event")


def _body(rng: random.Random) -> dict[str, Any]:
    text = f"Write some sentences about {rng.choice(_TOPICS)}, number {rng.randrange(1000)}."
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": rng.choice((16, 48, 96, 160)),
        "temperature": rng.choice((0, 0.8)),
        "seed": rng.randrange(1 << 30),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _reads(
    client: httpx.AsyncClient, rng: random.Random, leaves: bool, result: LoadResult
) -> str:
    stay, last = rng.randrange(1, 20) if leaves else 1 << 30, ""
    async with client.stream("POST", CHAT, json=_body(rng)) as reply:
        if reply.status_code != 200:
            await reply.aread()
            if reply.status_code == 429:
                await asyncio.sleep(float(reply.headers.get("retry-after", 1)))
            return str(reply.status_code)
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            last, stay = line[6:], stay - 1
            if last.startswith("{"):
                usage = json.loads(last).get("usage") or {}
                result.tokens += usage.get("completion_tokens", 0)
            if stay <= 0:
                return "left"
    if last == "[DONE]":
        return "complete"
    return "error event" if '"error"' in last else "cut"


async def _malformed(client: httpx.AsyncClient, rng: random.Random) -> str:
    headers = {"content-type": "application/json"}
    reply = await client.post(CHAT, content=rng.choice(_MALFORMED), headers=headers)
    return str(reply.status_code)


async def _stalls(url: str, rng: random.Random) -> str:
    """Asks for a reply and reads nothing of it."""
    host, _, port = url.removeprefix("http://").partition(":")
    content = json.dumps(_body(rng)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(head.encode() + content)
    await asyncio.sleep(rng.uniform(2, 10))
    writer.transport.abort()
    return "stalled"


async def _wait_until_idle(client: httpx.AsyncClient, result: LoadResult) -> None:
    until = time.monotonic() + _IDLE_SECONDS
    while True:
        text = (await client.get("/metrics")).text
        result.idle = {
            name: _gauge(text, name)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_tokens")
        }
        if result.is_idle or time.monotonic() > until:
            return
        await asyncio.sleep(0.2)


def _gauge(text: str, name: str) -> float:
    found = re.search(rf"^foredraft:{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


_GROWTH = 0.05


def serve_load(
    streams: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 32,
    seconds: Annotated[float, typer.Option(min=1, help="How long requests begin.")] = 120.0,
    url: Annotated[
        str | None, typer.Option(help="A server that runs; one is started otherwise.")
    ] = None,
    serve_option: Annotated[
        list[str] | None,
        typer.Option(help="For the server that is started, such as --model=DIR; may be repeated."),
    ] = None,
    kill_every: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds between kills of an engine: with --serve-option=--ray."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what clients do.")] = 0,
    output: o.Output = None,
) -> None:
    """Load a server with clients of whom some leave, never read, or send what is malformed.

    Fails if one that behaved got a 5xx or a stream that was cut, if the engine is not idle in the
    end, or if memory grew by more than 5 %.
    """
    check_outputs(output)
    if url is not None:
        result = asyncio.run(run_load(ServerProcess(url.rstrip("/")), streams, seconds, seed))
    else:
        with served(serve_option or ()) as server:
            result = asyncio.run(run_load(server, streams, seconds, seed, kill_every))
    _report(result, streams, seed).give(output)
    if result.faults or not result.is_idle or result.memory_growth > _GROWTH:
        raise ForedraftError(
            f"{len(result.faults)} clients that behaved were failed "
            f"({', '.join(sorted(set(result.faults))[:5])}), idle: {result.is_idle}, memory "
            f"{result.memory_growth:+.1%}"
        )


def _report(result: LoadResult, streams: int, seed: int) -> Report:
    rate, memory = result.tokens / result.seconds, result.memory_mb or [0.0]
    outcomes = [{"outcome": k, "count": v} for k, v in sorted(result.outcomes.items())]
    return Report(
        [Table("outcomes", outcomes, {"count": "{count:d}", "outcome": "{outcome}"})],
        {
            "streams": streams,
            "faults": len(result.faults),
            "tokens_per_s": rate,
            "memory_growth": result.memory_growth,
            "idle": result.is_idle,
        },
        [
            f"{rate:.1f} tokens/s to those who read",
            f"idle: {result.idle}",
            f"memory: {memory[0]:.0f} to {memory[-1]:.0f} MB, {result.memory_growth:+.1%}",
        ],
        seed,
    )
