"""`foredraft bench serve-load`: many clients, some of them bad."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from foredraft.cli import options as o
from foredraft.core.errors import ForedraftError

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
    seed: Annotated[int, typer.Option(help="Of what clients do.")] = 0,
    json_file: o.JsonFile = None,
) -> None:
    """Load a server with clients of whom some leave, never read, or send what is malformed.

    Fails if one that behaved got a 5xx or a stream that was cut, if the engine is not idle in the
    end, or if memory grew by more than 5 %.
    """
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.bench.serve_load import run_load
    from foredraft.bench.server_process import ServerProcess, served

    check_outputs(json_file)
    if url is not None:
        result = asyncio.run(run_load(ServerProcess(url.rstrip("/")), streams, seconds, seed))
    else:
        with served(serve_option or ()) as server:
            result = asyncio.run(run_load(server, streams, seconds, seed))
    for outcome, count in sorted(result.outcomes.items()):
        typer.echo(f"{count:6}  {outcome}")
    typer.echo(f"{result.tokens / result.seconds:.1f} tokens/s to those who read")
    typer.echo(f"idle: {result.idle}")
    memory = result.memory_mb or [0.0]
    typer.echo(f"memory: {memory[0]:.0f} to {memory[-1]:.0f} MB, {result.memory_growth:+.1%}")
    if json_file:
        figures = {
            "streams": streams,
            "outcomes": [{"outcome": k, "count": v} for k, v in sorted(result.outcomes.items())],
            "faults": len(result.faults),
            "tokens_per_s": result.tokens / result.seconds,
            "memory_growth": result.memory_growth,
            "idle": result.is_idle,
        }
        write_json(json_file, figures, seed)
    if result.faults or not result.is_idle or result.memory_growth > _GROWTH:
        raise ForedraftError(
            f"{len(result.faults)} clients that behaved were failed "
            f"({', '.join(sorted(set(result.faults))[:5])}), idle: {result.is_idle}, memory "
            f"{result.memory_growth:+.1%}"
        )
