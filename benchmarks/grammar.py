"""Cost of a grammar, and validity of its replies: JSON by a schema, drawn at temperature 1.

Some of the replies are timed beside free text, in turns, so that what the machine does meanwhile
meets both alike. Free text goes on for as many tokens as its neighbour with the grammar wrote: then
both time the same number of tokens at the same lengths.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.course import loading
from foredraft.bench.report import Report, check_outputs
from foredraft.cli import options as o
from foredraft.cli.display import progress_bar
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.engine.request import GenerationResult
from foredraft.llm import LLM
from foredraft.options import LoadOptions

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Berlin", "Lisbon", "Osaka", "Lima"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "tags", "active"],
    "additionalProperties": False,
}
"""Bounded, so that a reply has an end before `_MAX_TOKENS`."""
_PEOPLE = ("a baker", "a pilot", "a poet", "a nurse", "a farmer", "a singer", "a judge", "a cook")
_MAX_TOKENS = 400


@dataclass(frozen=True)
class GrammarRun:
    """One reply with the grammar, and one without beside it.

    Attributes:
        is_valid: whether it is JSON as the schema has it.
        tokens: of the reply with the grammar.
        ms_per_token, free_ms_per_token: with the grammar and without; None: not timed beside it.
        accepted: drafted tokens in the reply with the grammar.
    """

    seed: int
    is_valid: bool
    text: str
    tokens: int
    ms_per_token: float
    free_ms_per_token: float | None
    accepted: int


def measure_grammar(
    llm: LLM, count: int, temperature: float, num_timed: int
) -> Iterator[GrammarRun]:
    """Replies one after the other, each with a seed of its own; the first are timed."""
    grammar = Grammar.json_schema(SCHEMA)
    for seed in range(count):
        prompt = _prompt(llm, seed)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=_MAX_TOKENS)
        ruled, ms = _timed(llm, prompt, replace(params, grammar=grammar))
        tokens = max(2, len(ruled.token_ids))
        free_ms = None
        if seed < num_timed:
            free = replace(params, max_tokens=tokens, ignore_eos=True)
            _, free_ms = _timed(llm, prompt, free)
        yield GrammarRun(
            seed, is_valid(ruled), ruled.text, tokens, ms, free_ms, ruled.stats.accepted
        )


def is_valid(result: GenerationResult) -> bool:
    """Whether a reply is what `SCHEMA` describes. Looked at by hand: no validator is needed."""
    try:
        found = json.loads(result.text)
    except ValueError:
        return False
    checks: dict[str, Callable[[Any], bool]] = {
        "name": lambda v: isinstance(v, str) and len(v) <= 24,
        "age": lambda v: type(v) is int and 0 <= v <= 120,
        "city": lambda v: v in SCHEMA["properties"]["city"]["enum"],
        "tags": lambda v: (
            isinstance(v, list)
            and len(v) <= 3
            and all(isinstance(tag, str) and len(tag) <= 12 for tag in v)
        ),
        "active": lambda v: isinstance(v, bool),
    }
    return (
        isinstance(found, dict)
        and found.keys() == checks.keys()
        and all(check(found[name]) for name, check in checks.items())
    )


def summary(runs: Sequence[GrammarRun]) -> dict[str, Any]:
    """The figures of all runs together."""
    pairs = [(r.ms_per_token, r.free_ms_per_token) for r in runs if r.free_ms_per_token is not None]
    with_grammar, without = (median(column) for column in zip(*pairs, strict=True))
    total = sum(run.tokens for run in runs)
    return {
        "replies": len(runs),
        "timed": len(pairs),
        "valid": sum(run.is_valid for run in runs),
        "tokens": total,
        "accepted_share": round(sum(run.accepted for run in runs) / total, 4),
        "ms_per_token": round(with_grammar, 3),
        "free_ms_per_token": round(without, 3),
        "slower_by": round(with_grammar / without - 1.0, 4),
        "invalid": [{"seed": run.seed, "text": run.text} for run in runs if not run.is_valid],
    }


def _prompt(llm: LLM, seed: int) -> list[int]:
    assert llm.tokenizer is not None
    person = _PEOPLE[seed % len(_PEOPLE)]
    return llm.tokenizer.encode_chat(
        [{"role": "user", "content": f"Describe {person} as JSON: name, age, city, tags, active."}]
    )


def _timed(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[GenerationResult, float]:
    """A reply, and milliseconds a token behind the first step, which reads the prompt."""
    first, first_tokens, result = 0.0, 0, None
    for event in llm.stream(prompt, params):
        if event.token_ids and not first:
            first, first_tokens = time.perf_counter(), len(event.token_ids)
        result = event.result
    assert result is not None
    behind = max(1, len(result.token_ids) - first_tokens)
    return result, 1e3 * (time.perf_counter() - first) / behind


@o.with_options
def grammar(
    load: Annotated[LoadOptions, loading()],
    replies: Annotated[int, typer.Option(min=1, help="How many replies to draw.")] = 500,
    timed: Annotated[int, typer.Option(min=1, help="How many beside free text.")] = 100,
    temperature: Annotated[float, typer.Option(help="Of the replies.")] = 1.0,
    output: o.Output = None,
) -> None:
    """Draw JSON by a schema, check each reply, and time some against free text of the same length.

    The exit status is 1 if a reply is not what the schema describes.
    """
    check_outputs(output)
    llm = o.load_llm(load)
    runs = []
    with progress_bar(replies) as advance:
        for run in measure_grammar(llm, replies, temperature, timed):
            runs.append(run)
            advance("drawing")
    figures = summary(runs)
    name = llm.plan.name if llm.plan else None
    facts = {"model": name, "drafter": llm.drafter_name, "temperature": temperature}
    Report(facts=facts | figures, lines=_lines(figures, llm, temperature)).give(output)
    if figures["invalid"]:
        raise typer.Exit(1)


def _lines(figures: dict[str, Any], llm: LLM, temperature: float) -> list[str]:
    return [
        f"{figures['valid']} of {figures['replies']} replies valid at temperature {temperature}; "
        f"{figures['tokens']} tokens, {100 * figures['accepted_share']:.0f} % of them drafted "
        f"({llm.drafter_name})",
        f"{figures['ms_per_token']} ms a token with the grammar, {figures['free_ms_per_token']} "
        f"without: {100 * figures['slower_by']:+.1f} %",
        *(f"seed {each['seed']}: {each['text']!r}" for each in figures["invalid"]),
    ]
