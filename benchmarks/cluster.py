"""Cost of a cluster's gate: the same chats through gate and engine, and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from benchmarks.clients import Task, compare, serving_report
from benchmarks.server_process import served
from foredraft.bench.prompts import load_prompts
from foredraft.bench.report import check_outputs
from foredraft.cli import options as o

_NAMES = ("one process", "gate and engine")


def cluster(
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,4,16",
    limit: Annotated[int, typer.Option(min=1, help="Prompts.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, after one that warms up.")] = 5,
    replicas: Annotated[int, typer.Option(min=1, help="Engines of the cluster.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Of each engine.")] = 1,
    output: o.Output = None,
) -> None:
    """Compare `foredraft serve` with a cluster on this machine, in rotating order.

    It needs foredraft[ray]. The one process has as many threads as all engines together. With one
    engine the tier's cost is measured, if its threads leave a core to the gate; with several also
    what batches lose that are split.
    """
    check_outputs(output)
    task = Task([prompt.text for prompt in load_prompts(None, limit)], max_tokens, 0.0)
    counts = o.numbers("--clients", clients, int, low=1)
    own, together = (["--threads", str(number)] for number in (threads, threads * replicas))
    tier = ["--ray", "--replicas", str(replicas)]
    with served(together) as alone, served([*own, *tier]) as tiers:
        urls = dict(zip(_NAMES, (alone.url, tiers.url), strict=True))
        figures = compare(urls, counts, task, rounds)
    report = serving_report(figures)
    pairs = list(zip(figures[::2], figures[1::2], strict=True))
    lines = [
        f"{one.clients} clients: {two.tokens_per_s / one.tokens_per_s:.3f} of the tokens a second, "
        f"first token {two.first_token_ms - one.first_token_ms:+.1f} ms"
        for one, two in pairs
    ]
    replace(report, lines=lines).give(output)
