"""Peers by their names on the command line, each in a process of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from foredraft.cli.options import names
from foredraft.core.errors import unknown

if TYPE_CHECKING:
    from benchmarks.contenders import Contender
    from benchmarks.forwards import TimedStepper
    from foredraft.llm import LLM

_LLAMA, _LOOKUP = "llama.cpp-", "-ngram"
LLAMA_PEERS = tuple(f"{_LLAMA}{kind}" for kind in ("bf16", "q8_0", "q4_1", "q4_0"))


def peer_names(text: str | None, known: Sequence[str]) -> list[str]:
    """Names of peers with commas between them.

    Raises:
        ConfigError: one is not among ``known``; the message has the nearest that is.
    """
    given = names(text)
    for name in given:
        if name not in known:
            raise unknown("peer", name, known)
    return given


def open_contender(
    llm: LLM, name: str, max_context: int, stop_ids: Collection[int] = ()
) -> Contender:
    """A peer with the weights of a loaded model and torch's threads, greedy.

    Args:
        name: one of `LLAMA_PEERS`, "transformers", or either family with its prompt lookup,
            "llama.cpp-ngram" (bfloat16) and "transformers-ngram".
        max_context: most tokens of prompt and reply.
        stop_ids: tokens that end a reply.
    """
    import torch

    from benchmarks.llama_cpp import LlamaCppContender
    from benchmarks.peer_process import PeerContender
    from benchmarks.transformers_peer import TransformersContender

    plan, looks_up = llm.plan, name.endswith(_LOOKUP)
    assert plan is not None
    kind, lookup = _kind(name.removesuffix(_LOOKUP)), " ngram" if looks_up else ""
    if kind is None:
        return PeerContender(
            TransformersContender, f"transformers{lookup}", directory=str(plan.directory),
            dtype=plan.dtype, device=plan.device, assistant="ngram" if looks_up else None,
        )  # fmt: skip
    return PeerContender(
        LlamaCppContender, f"llama.cpp {kind}{lookup}", model=str(plan.directory),
        max_context=max_context, threads=torch.get_num_threads(), stop_ids=list(stop_ids),
        lookup=looks_up, quantisation=kind,
    )  # fmt: skip


def open_stepper(
    llm: LLM, name: str, context: int, most_tokens: int, model: str | None = None
) -> TimedStepper:
    """A peer's forward of up to ``most_tokens`` behind ``context`` others.

    Args:
        name: "transformers" or one of `LLAMA_PEERS`.
        model: for llama.cpp; None: the checkpoint that is loaded.
    """
    import torch

    from benchmarks.llama_cpp import LlamaCppStepper
    from benchmarks.peer_process import PeerStepper
    from benchmarks.transformers_peer import TransformersStepper

    plan, kind = llm.plan, _kind(name)
    assert plan is not None
    if kind is None:
        return PeerStepper(
            TransformersStepper, name, directory=str(plan.directory), dtype=plan.dtype,
            device=plan.device, context=context,
        )  # fmt: skip
    return PeerStepper(
        LlamaCppStepper, f"llama.cpp {kind}", model=model or str(plan.directory),
        quantisation=kind, context=context, most_tokens=most_tokens,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def _kind(name: str) -> str | None:
    """llama.cpp's name of a format of weights; None: it is transformers."""
    if name.startswith("transformers"):
        return None
    return name.removeprefix(_LLAMA) if name in LLAMA_PEERS else "bf16"
