"""Prefix-cache hits of growing chats, by the routing to engines."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from benchmarks.prefix import TURNS
from benchmarks.server_process import served
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class RoutingHits:
    """Prompt tokens of chats, and how many of them were found in a cache.

    Attributes:
        routing: what decides who gets which engine: the "beginning" of a chat, its
            "prompt_cache_key", or chance ("random").
        engines: in the cluster.
    """

    routing: str
    engines: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def routing_hits(
    url: str, routing: str, engines: int, chats: int, clients: int, max_tokens: int
) -> RoutingHits:
    """Hold chats of several turns, some at a time, of which nothing is cached yet."""
    fresh = uuid.uuid4().hex[:8]
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(clients) as pool:
        names = [f"{fresh}-{number}" for number in range(chats)]
        usages = [
            usage
            for found in pool.map(lambda name: _chat(client, routing, name, max_tokens), names)
            for usage in found
        ]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return RoutingHits(routing, engines, sum(usage["prompt_tokens"] for usage in usages), cached)


def _chat(client: httpx.Client, routing: str, name: str, max_tokens: int) -> list[Any]:
    """The ``usage`` of each turn."""
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "seed": 1}
    if routing == "prompt_cache_key":
        body["prompt_cache_key"] = name
    messages: list[dict[str, str]] = []
    usages = []
    for turn, text in enumerate(TURNS):
        said = text if turn else f"This is chat {name}. {text}"
        messages.append({"role": "user", "content": said})
        session = {"x-session-id": uuid.uuid4().hex} if routing == "random" else {}
        answer = client.post(CHAT, json=body | {"messages": messages}, headers=session)
        answer.raise_for_status()
        reply = answer.json()
        content = reply["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        usages.append(reply["usage"])
    return usages


def affinity(
    chats: Annotated[int, typer.Option(min=1, help="Of five turns each.")] = 12,
    clients: Annotated[int, typer.Option(min=1, help="Chats at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 32,
    replicas: Annotated[int, typer.Option(min=2, help="Engines of the cluster.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Of each engine.")] = 1,
    output: o.Output = None,
) -> None:
    """Prefix-cache hits of chats with one engine, and with several by who is sent where.

    It needs foredraft[ray].
    """
    check_outputs(output)
    routings = {1: ["beginning"], replicas: ["beginning", "prompt_cache_key", "random"]}
    figures = []
    for engines, ways in routings.items():
        with served(["--threads", str(threads), "--ray", "--replicas", str(engines)]) as server:
            figures += [
                routing_hits(server.url, way, engines, chats, clients, max_tokens) for way in ways
            ]
    routing_report(figures).give(output)


def routing_report(figures: Sequence[RoutingHits]) -> Report:
    """As a table; the first figure is that of one engine."""
    single = figures[0].share
    rows = [
        vars(figure) | {"share": figure.share, "of_single": figure.share / single}
        for figure in figures
    ]
    columns = {
        "engines": "{engines:d}",
        "by": "{routing}",
        "prompt tokens": "{prompt_tokens:d}",
        "cached": "{cached_tokens:d}",
        "share": "{share:.1%}",
        "of one engine's": "{of_single:.3f}",
    }
    return Report([Table("hits", rows, columns)])
