"""Time saved by a cached beginning, and a check that drafts do not change cache hits."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from benchmarks.course import Rounds, loading
from benchmarks.random_model import load_llm
from foredraft.bench.report import Report, Table, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.text.prompts import Message
from foredraft.options import LoadOptions

_OWN_TOKENS = 20
"""Of each prompt, behind what it shares."""


@dataclass(frozen=True)
class PrefixFigure:
    """Times to the first token, in milliseconds; medians.

    Attributes:
        shared_tokens: that all prompts begin with.
        cold_ms: of a prompt of which nothing is cached.
        warm_ms: of one whose beginning is.
        cached_tokens: what was found of it.
        same_text: whether the replies are the same with and without what was cached.
    """

    shared_tokens: int
    cold_ms: float
    warm_ms: float
    cached_tokens: int
    same_text: bool

    @property
    def speedup(self) -> float:
        return self.cold_ms / self.warm_ms


def measure_prefix(llm: LLM, shared_tokens: int, rounds: int, seed: int = 0) -> PrefixFigure:
    """Cold and warm requests in turns, each round with a prefix of its own.

    Raises:
        ConfigError: the context holds no such prompts, or prefix caching is off.
    """
    longest = llm.target.max_context - _OWN_TOKENS - 8
    if shared_tokens > longest:
        raise ConfigError(f"--shared is {shared_tokens}; this context has room for {longest}")
    dice = random.Random(seed)
    cold, warm, cached, same = list[float](), list[float](), 0, True
    for _ in range(rounds + 1):  # the first one warms up
        prefix = _tokens(llm, dice, shared_tokens)
        first, second = ([*prefix, *_tokens(llm, dice, _OWN_TOKENS)] for _ in range(2))
        cold.append(_first_token(llm, first)[0])
        taken, reply, cached = _first_token(llm, second)
        warm.append(taken)
        llm.engine.forget_prefixes()
        same &= reply == _first_token(llm, second)[1]
        llm.engine.forget_prefixes()
    if not cached:
        raise ConfigError("nothing was found in the cache: leave prefix_caching on")
    cold_ms, warm_ms = (statistics.median(times[1:]) for times in (cold, warm))
    return PrefixFigure(shared_tokens, cold_ms, warm_ms, cached, same)


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, tuple[int, ...], int]:
    """Milliseconds to the first token; the reply, and how much of the prompt was cached."""
    params, taken = SamplingParams(max_tokens=8, ignore_eos=True), 0.0
    started = time.perf_counter()
    for event in llm.stream(prompt, params):
        if event.token_ids and not taken:
            taken = 1e3 * (time.perf_counter() - started)
        if event.result is not None:
            return taken, event.result.token_ids, event.result.num_cached_tokens
    raise RuntimeError("a stream ended without a result; this is a bug of foredraft")


def _tokens(llm: LLM, dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(5, llm.target.vocab_size) for _ in range(count)]


@dataclass(frozen=True)
class Hits:
    """Prompt tokens of a conversation, and how many of them were found in the cache.

    Attributes:
        drafted: draft tokens that its replies took.
    """

    speculation: str
    prompt_tokens: int
    cached_tokens: int
    drafted: int

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


TURNS = (
    "Name three things that a lighthouse keeper does every evening.",
    "Say it again, as a numbered list.",
    "Rewrite the list in the past tense.",
    "Which of them was the hardest? Quote it and explain.",
    "Now repeat the whole list once more, unchanged.",
)


def conversation_hits(llm: LLM, speculation: str, params: SamplingParams) -> Hits:
    """Hold a conversation of several turns, from an empty cache of prefixes."""
    llm.engine.forget_prefixes()
    asked = replace(params, speculation=speculation)
    messages: list[Message] = []
    prompt_tokens = cached_tokens = drafted = 0
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        reply = llm.chat(messages, asked)
        messages.append({"role": "assistant", "content": reply.text})
        prompt_tokens += reply.num_prompt_tokens
        cached_tokens += reply.num_cached_tokens
        drafted += reply.stats.drafted
    return Hits(speculation, prompt_tokens, cached_tokens, drafted)


@o.with_options
def prefix_hits(
    load: Annotated[LoadOptions, loading()],
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each reply.")] = 96,
    output: o.Output = None,
) -> None:
    """Prefix-cache hits of a conversation, with drafts and without: they must be the same.

    The exit status is 1 if they are not.
    """
    check_outputs(output)
    llm = load_llm(load, None)
    rows = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens)
        for speculation in ("off", "auto"):
            hits = conversation_hits(llm, speculation, params)
            rows.append({"temperature": temperature, **vars(hits), "share": hits.share})
    columns = {
        "temperature": "{temperature:.1f}",
        "drafts": "{speculation}",
        "drafted": "{drafted:d}",
        "prompt tokens": "{prompt_tokens:d}",
        "cached": "{cached_tokens:d}",
        "share": "{share:.1%}",
    }
    Report([Table("hits", rows, columns)]).give(output)
    if any(off["share"] != on["share"] for off, on in zip(rows[::2], rows[1::2], strict=True)):
        raise typer.Exit(1)


@o.with_options
def prefix(
    load: Annotated[LoadOptions, loading(calibrate=False)],
    shared: Annotated[
        int, typer.Option(min=1, help="Tokens that the second prompt shares with the first.")
    ] = 1000,
    rounds: Rounds = 5,
    random_weights: Annotated[
        str | None, typer.Option(help="Instead: this shape, random weights, for timing only.")
    ] = None,
    output: o.Output = None,
) -> None:
    """Time to the first token of a new prompt, and of one that shares its beginning.

    The exit status is 1 if a reply is another one with the cache than without.
    """
    check_outputs(output)
    figure = measure_prefix(load_llm(load, random_weights), shared, rounds)
    line = (
        f"first token of {figure.shared_tokens} shared tokens and some: {figure.cold_ms:.1f} ms, "
        f"with {figure.cached_tokens} of them cached {figure.warm_ms:.1f} ms "
        f"({figure.speedup:.1f}x sooner); texts {'equal' if figure.same_text else 'DIFFER'}"
    )
    Report(facts=vars(figure) | {"speedup": figure.speedup}, lines=[line]).give(output)
    if not figure.same_text:
        raise typer.Exit(1)
