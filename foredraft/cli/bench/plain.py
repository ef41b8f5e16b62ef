"""What benches of plain decoding have in common: ours in several ways, peers, a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import options as o
from foredraft.cli.bench.peers import LLAMA_PEERS, open_contender
from foredraft.cli.lists import known_names
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.contenders import Contender
    from foredraft.bench.turns import Figure
    from foredraft.llm import LLM

_ROOM = 8
"""Tokens that a peer may want its context to be longer."""

_F = TypeVar("_F", bound="Figure[float]")

Against = Annotated[str | None, typer.Option(help=f"Peers with commas: {', '.join(LLAMA_PEERS)}.")]


def load_plain(
    running: o.ModelOptions, against: str | None, num_tokens: int, **variants: Any
) -> tuple[LLM, list[Contender]]:
    """The first of ours, and all contenders, peers behind ours.

    Args:
        num_tokens: most tokens of a prompt and its reply.
        variants: of ours; see `variants.load_variants`.

    Raises:
        ConfigError: a peer is unknown, or the model's context is shorter.
    """
    from foredraft.bench.contenders import OurContender
    from foredraft.bench.variants import load_variants

    peers = known_names("peer", against, LLAMA_PEERS)
    asked = o.load_options(running, drafter="none", max_batch_size=1)
    loaded = load_variants(asked, o.load_llm, **variants)
    llm = loaded[0].llm
    if num_tokens > llm.target.max_context:
        raise ConfigError(
            f"{num_tokens} tokens are asked for; the context is {llm.target.max_context}"
        )
    ours = [OurContender(one.llm, asked, one.name) for one in loaded]
    return llm, [*ours, *(open_contender(llm, name, num_tokens + _ROOM) for name in peers)]


def print_by_column(
    title: str, columns: Mapping[str, Sequence[_F]], cell: Callable[[_F], str]
) -> None:
    """A row for each contender.

    Args:
        columns: by their titles, each with a figure for each contender.
    """
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(title)
    for name in columns:
        table.add_column(name, justify="right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(row[0].name, *(one.failure or cell(one) for one in row))
    Console(highlight=False).print(table)
