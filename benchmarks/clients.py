"""The same clients against several servers in turn: tokens a second and time to the first token.

Servers are given as addresses; all servers of the same weights can be compared. In each round every
server gets the same prompts from the same number of clients, in rotating order. Each prompt begins
with a number of its own, so that no server has read it before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from foredraft.bench.report import Report, Table
from foredraft.core.errors import ForedraftError

CHAT = "/v1/chat/completions"
SEED = 1
"""Fields of every request."""


@dataclass(frozen=True)
class Task:
    """The clients' requests.

    Attributes:
        prompts: texts of a user; clients take them one after the other.
        max_tokens: of a reply.
        temperature: of sampling.
        api_key: sent as a bearer token; None: no key.
        model: the name to ask for; None leaves it out.
    """

    prompts: Sequence[str]
    max_tokens: int
    temperature: float
    api_key: str | None = None
    model: str | None = None

    def in_round(self, number: int, clients: int) -> Task:
        """The task of one round: at least one prompt a client, none of which came before."""
        count = max(clients, len(self.prompts))
        texts = itertools.islice(itertools.cycle(self.prompts), count)
        prompts = [f"Task {clients}.{number}.{place}: {text}" for place, text in enumerate(texts)]
        return replace(self, prompts=prompts)


@dataclass(frozen=True)
class ClientsFigure:
    """Results of one server with ``clients`` clients.

    Attributes:
        tokens_per_s: of all clients together, median of rounds.
        first_token_ms: from the request to its first text, median.
        between_ms: per token after the first, median.
        rounds: tokens a second of each round.
    """

    server: str
    clients: int
    tokens_per_s: float
    first_token_ms: float
    between_ms: float
    rounds: tuple[float, ...]


@dataclass
class Reply:
    """Result of one request: its tokens, and seconds to the first and to the end."""

    tokens: int
    first_s: float
    total_s: float


def compare(
    servers: Mapping[str, str], clients: Sequence[int], task: Task, rounds: int
) -> list[ClientsFigure]:
    """Measure every server with every number of clients.

    Args:
        servers: names and addresses.

    Raises:
        ForedraftError: a server does not answer.
    """
    figures: list[ClientsFigure] = []
    for count in clients:
        replies: dict[str, list[Reply]] = {name: [] for name in servers}
        rates: dict[str, list[float]] = {name: [] for name in servers}
        names = list(servers)
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                part = task.in_round(number, count)
                came, seconds = asyncio.run(ask_all(servers[name], count, part))
                if number:  # the first is to warm up
                    replies[name] += came
                    rates[name].append(sum(reply.tokens for reply in came) / seconds)
        figures += [_figure(name, count, replies[name], rates[name]) for name in servers]
    return figures


def _figure(
    name: str, clients: int, replies: Sequence[Reply], rates: Sequence[float]
) -> ClientsFigure:
    several = [reply for reply in replies if reply.tokens > 1]
    between = [(reply.total_s - reply.first_s) / (reply.tokens - 1) for reply in several]
    return ClientsFigure(
        server=name,
        clients=clients,
        tokens_per_s=statistics.median(rates),
        first_token_ms=1000 * statistics.median(reply.first_s for reply in replies),
        between_ms=1000 * statistics.median(between or [0.0]),
        rounds=tuple(rates),
    )


def serving_report(figures: Sequence[ClientsFigure]) -> Report:
    """Figures of servers as a table."""
    columns = {"clients": "{clients:d}", "server": "{server}", "tokens/s": "{tokens_per_s:.1f}",
               "first token ms": "{first_token_ms:.0f}",
               "ms a token": "{between_ms:.1f}"}  # fmt: skip
    rows = [vars(figure) | {"rounds": [*figure.rounds]} for figure in figures]
    return Report([Table("figures", rows, columns)], seed=SEED)


async def ask_all(url: str, clients: int, task: Task) -> tuple[list[Reply], float]:
    """Send every prompt once, with ``clients`` clients; the replies, and seconds in all.

    Raises:
        ForedraftError: the server does not answer.
    """
    waiting = [*task.prompts]
    replies: list[Reply] = []
    began = time.perf_counter()

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            replies.append(await _ask(http, waiting.pop(0), task))

    headers = {"Authorization": f"Bearer {task.api_key}"} if task.api_key else {}
    async with httpx.AsyncClient(base_url=url, timeout=300, headers=headers) as http:
        try:
            await asyncio.gather(*(client(http) for _ in range(clients)))
        except httpx.HTTPError as error:
            raise ForedraftError(f"the server at {url} does not answer: {error!r}") from error
    return replies, time.perf_counter() - began


def request_body(prompt: str, task: Task) -> dict[str, Any]:
    """Result of one streamed chat reply, whose last chunk counts its tokens."""
    named = {"model": task.model} if task.model else {}
    return named | {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": task.max_tokens,
        "temperature": task.temperature,
        "seed": SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(http: httpx.AsyncClient, prompt: str, task: Task) -> Reply:
    """One streamed reply. Tokens are the server's own count, or its events where it tells none."""
    began, first, events, counted = time.perf_counter(), 0.0, 0, 0
    async with http.stream("POST", CHAT, json=request_body(prompt, task)) as reply:
        if reply.status_code != 200:
            raise ForedraftError(f"{http.base_url}: {(await reply.aread()).decode()[:300]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                events += 1
                first = first or time.perf_counter() - began
    return Reply(counted or events, first, time.perf_counter() - began)
