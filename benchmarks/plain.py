"""Shared by benchmarks of plain decoding: ours in several ways, and other engines."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from benchmarks.contenders import Contender, OurContender
from benchmarks.course import loading
from benchmarks.peers import LLAMA_PEERS, open_contender, peer_names
from benchmarks.variants import load_variants
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.llm import LLM
from foredraft.options import LoadOptions

_ROOM = 8
"""Tokens by which a peer may want its context to be longer."""

PLAINLY = loading(drafter="none", draft_model=None, drafter_options={}, max_batch_size=1)
Against = Annotated[str | None, typer.Option(help=f"Peers with commas: {', '.join(LLAMA_PEERS)}.")]


def load_plain(
    load: LoadOptions, against: str | None, num_tokens: int, **variants: Any
) -> tuple[LLM, list[Contender]]:
    """The first of ours, and all contenders, peers behind ours.

    Args:
        num_tokens: most tokens of a prompt and its reply.
        variants: of ours; see `variants.load_variants`.

    Raises:
        ConfigError: a peer is unknown, or the model's context is shorter.
    """
    peers = peer_names(against, LLAMA_PEERS)
    loaded = load_variants(load, o.load_llm, **variants)
    llm = loaded[0].llm
    if num_tokens > llm.target.max_context:
        raise ConfigError(
            f"{num_tokens} tokens are asked for; the context is {llm.target.max_context}"
        )
    ours = [OurContender(one.llm, load, one.name) for one in loaded]
    return llm, [*ours, *(open_contender(llm, name, num_tokens + _ROOM) for name in peers)]
