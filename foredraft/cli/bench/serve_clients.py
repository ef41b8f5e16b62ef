"""`foredraft bench serve-clients`: the same clients against several servers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import lists
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.serve_clients import ClientsFigure


def serve_clients(
    server: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL of a server that runs, to compare with; may be repeated."),
    ] = None,
    clients: Annotated[str, typer.Option(help="Clients at a time, with commas.")] = "1,4,16",
    prompts: o.Prompts = None,
    limit: o.Limit = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, after one to warm up.")] = 3,
    serve_option: Annotated[
        list[str] | None,
        typer.Option(help="For our server, such as --drafter=none; may be repeated."),
    ] = None,
    json_file: o.JsonFile = None,
) -> None:
    """Tokens a second and time to the first token, as clients see them.

    Ours is started; others are given by address, such as `python -m llama_cpp.server` on the
    same weights (docs/operate/server.md says how). Each round gives all the same prompts, in
    rotating order, and no prompt comes twice.

    Examples:

        foredraft bench serve-clients --server llama.cpp=http://127.0.0.1:8001
    """
    from foredraft.bench.prompts import load_prompts
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.bench.serve_clients import Asked, compare
    from foredraft.bench.server_process import served

    check_outputs(json_file)
    others = dict(_named(text) for text in server or ())
    texts = [prompt.text for prompt in load_prompts(prompts, limit)]
    asked = Asked(texts, max_tokens, temperature)
    counts = lists.whole_numbers("--clients", clients)
    with ExitStack() as stack:
        ours = stack.enter_context(served(serve_option or ()))
        figures = compare({"foredraft": ours.url, **others}, counts, asked, rounds)
    _show(figures)
    if json_file:
        write_json(json_file, {"figures": [asdict(figure) for figure in figures]}, seed=1)


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not url.startswith(("http://", "https://")):
        raise ConfigError(f"--server {text!r} is not NAME=URL")
    return name, url.rstrip("/")


def _show(figures: list[ClientsFigure]) -> None:
    table = Table("clients", "server", "tokens/s", "first token ms", "ms a token")
    for each in figures:
        table.add_row(
            str(each.clients),
            each.server,
            f"{each.tokens_per_s:.1f}",
            f"{each.first_token_ms:.0f}",
            f"{each.between_ms:.1f}",
        )
    Console().print(table)
