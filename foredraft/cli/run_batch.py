"""`foredraft run-batch`: a file of requests in OpenAI's batch format, answered offline."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options as o
from foredraft.cli.cluster import ClusterAsked
from foredraft.cli.display import progress_bar, say
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions
from foredraft.server.batch import (
    AnswerFile,
    BatchSummary,
    check_requests,
    in_process,
    run_batch,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foredraft.server.settings import ServerSettings

NewApp = Callable[..., "FastAPI"]

_LOADING = replace(
    o.model(
        "max_batch_size", shown=("model", "drafter", "draft_model", "max_batch_size"), samples=True
    ),
    defaults={"max_batch_size": 16},
    names={"max_batch_size": "--concurrency"},
)


@o.with_options
def run_batch_file(
    file: Annotated[Path, typer.Argument(help="Requests, one JSON object a line.")],
    load: Annotated[LoadOptions, _LOADING],
    cluster: Annotated[ClusterAsked, o.Derived("Cluster", without=("engine_timeout",), shown=())],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Answers; FILE with .out.jsonl when not given."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="A name of the model in requests; may be repeated."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each line names a custom_id, a url (/v1/chat/completions, /v1/completions or /v1/responses) and
    a body; answers are what `foredraft serve` would send. They are written as they come.
    After an interrupt the same command continues: requests with an answer in the output are
    skipped.

    The exit status is 1 when the output holds a failed request; its answer says why.

    Examples:

        foredraft run-batch requests.jsonl

        foredraft run-batch requests.jsonl -o answers.jsonl --concurrency 32 --json

        foredraft run-batch requests.jsonl --ray --address auto --replicas 4
    """
    output = output or file.with_name(f"{file.stem}.out.jsonl")
    if output.resolve() == file.resolve():
        raise ConfigError("requests and answers cannot be the same file")
    ids = check_requests(file)
    with AnswerFile(output) as answers:
        missing = sum(custom_id not in answers.answered for custom_id in ids)
        summary, seconds = BatchSummary(skipped=len(ids)), 0.0
        if missing:
            from foredraft.server.settings import local_settings

            settings = local_settings(served_model_names=tuple(served_model_name or ()))
            try:
                with _server(cluster, load, settings) as (new_app, concurrency):
                    start = time.perf_counter()
                    summary = _answer(new_app, concurrency, file, answers, missing)
                    seconds = time.perf_counter() - start
            except KeyboardInterrupt:
                done = len(answers.answered)
                said = f"{done} of {len(ids)} answered; the same command goes on from there"
                say(said, stderr=True)
                raise
    _report(summary, answers.num_failed, seconds, output, as_json)
    if summary.failed or answers.num_failed:
        raise typer.Exit(1)


@contextmanager
def _server(
    cluster: ClusterAsked, load: LoadOptions, settings: ServerSettings
) -> Iterator[tuple[NewApp, int]]:
    if cluster.ray:
        with cluster.asked_from_here(load, settings) as found:
            yield found
    else:
        from foredraft.server.app import create_app

        llm = o.load_llm(load)
        yield partial(create_app, lambda feed: llm, settings), llm.engine.max_batch_size


def _answer(
    new_app: NewApp, concurrency: int, file: Path, answers: AnswerFile, missing: int
) -> BatchSummary:
    start = time.perf_counter()
    with progress_bar(missing) as advance:

        def show(so_far: BatchSummary) -> None:
            rate = so_far.completion_tokens / (time.perf_counter() - start)
            advance(f"{rate:.0f} tokens/s")

        async def run() -> BatchSummary:
            async with in_process(new_app) as ask:
                return await run_batch(file, answers, ask, concurrency, show)

        return asyncio.run(run())


def _report(
    summary: BatchSummary, failed_before: int, seconds: float, output: Path, as_json: bool
) -> None:
    rate = summary.completion_tokens / seconds if seconds else 0.0
    if as_json:
        figures = {"seconds": round(seconds, 2), "tokens_per_second": round(rate, 1)}
        figures["failed_before"] = failed_before
        typer.echo(json.dumps(asdict(summary) | figures | {"output": str(output)}))
        return
    before = f"{summary.skipped} answered before"
    before += f" ({failed_before} of them failed)" * bool(failed_before)
    say(
        f"{summary.answered} answered, {summary.failed} failed, {before}; "
        f"{summary.completion_tokens} tokens in {seconds:.1f} s ({rate:.0f} a second): {output}",
        stderr=True,
    )
