"""llama.cpp's names on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foredraft.cli.lists import known_names

if TYPE_CHECKING:
    from foredraft.bench.contenders import Contender
    from foredraft.llm import LLM

FORMATS = ("bf16", "q8_0", "q4_1", "q4_0")
LLAMA_PEERS = tuple(f"llama.cpp-{kind}" for kind in FORMATS)


def llama_names(against: str | None) -> list[str]:
    """Peers with commas.

    Raises:
        ConfigError: one is unknown.
    """
    return known_names("peer", against, LLAMA_PEERS)


def llama_contenders(llm: LLM, names: Sequence[str], max_context: int) -> list[Contender]:
    """Those of `llama_names`, with the weights of a loaded model and torch's threads."""
    import torch

    from foredraft.bench.llama_cpp import LlamaCppContender

    plan = llm.plan
    assert plan is not None
    return [
        LlamaCppContender(
            plan.directory, max_context, torch.get_num_threads(), (),
            quantisation=name.removeprefix("llama.cpp-"),
        )
        for name in names
    ]  # fmt: skip
