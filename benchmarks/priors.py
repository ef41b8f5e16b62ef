"""Measures the first estimates of drafters that copy, on texts that a model wrote.

Whether a guess would have been right shows on the finished text: nothing is drafted and nothing
timed. Old priors count as a few observations, so that rare classes keep a sensible value.

Shape legend: N positions, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from benchmarks.course import Limit, Prompts, loading
from foredraft.bench.prompts import BenchPrompt, load_prompts, prompt_ids
from foredraft.cli import options as o
from foredraft.cli.display import progress_bar
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters.prediction import AlignmentConfidence, PredictedText
from foredraft.drafters.text.confidence import MatchConfidence, Priors
from foredraft.drafters.text.confidence import priors as known_priors
from foredraft.drafters.text.id_files import SEPARATOR
from foredraft.drafters.text.suffix import NO_MATCH, SearchedText, SuffixAutomaton
from foredraft.drafters.text.token_recycling import (
    NUM_CANDIDATES,
    RankConfidence,
    Successors,
    likeliest,
)
from foredraft.llm import LLM
from foredraft.models.base import ScoreRow, Target, read
from foredraft.options import LoadOptions

_CHUNK = 64


@dataclass(frozen=True)
class SeenReply:
    """A text to measure on.

    Attributes:
        prompt, output: token ids.
        expected: what the output was expected to repeat; empty if nothing.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    expected: Sequence[int] = ()


def measure_priors(
    target: Target, replies: Sequence[SeenReply], advance: Callable[[str], None]
) -> Priors:
    """Shares of right guesses on ``replies``; those before count as other texts.

    Args:
        target: what wrote them; it says which tokens came near.
        advance: told after each reply.
    """
    known = known_priors()
    repeated, other = MatchConfidence(known.repeated_text), MatchConfidence(known.other_text)
    confidence, ranks, earlier = AlignmentConfidence(), RankConfidence(), SuffixAutomaton()
    for reply in replies:
        _match_itself(reply, repeated)
        _match_earlier(reply, earlier, other)
        _align(reply, confidence)
        _recycle(target, reply, ranks)
        advance("measuring")
    return Priors(
        repeated_text=_shares(repeated, known.repeated_text),
        other_text=_shares(other, known.other_text),
        followed=_shares(confidence.followed, known.followed),
        met=_shares(confidence.met, known.met),
        replaced=_shares(confidence.replaced, known.replaced),
        inserted=_shares(confidence.inserted, known.inserted),
        ranks=tuple(_rounded(ranks[steadiness]) for steadiness in range(len(known.ranks))),
    )


def _match_itself(reply: SeenReply, confidence: MatchConfidence) -> None:
    text = SuffixAutomaton()
    source = SearchedText(text, confidence)
    for token in reply.prompt:
        text.extend(token)
    for token in reply.output:
        source.record(text.end, token)
        text.extend(token)


def _match_earlier(reply: SeenReply, earlier: SuffixAutomaton, confidence: MatchConfidence) -> None:
    source, match = SearchedText(earlier, confidence), NO_MATCH
    for token in reply.output:
        source.record(earlier.with_followers(match), token)
        match = earlier.advance(match, token)
    for token in (*reply.output, SEPARATOR):
        earlier.extend(token)


def _align(reply: SeenReply, confidence: AlignmentConfidence) -> None:
    if not reply.expected:
        return
    text = PredictedText(reply.expected, confidence)
    for token in reply.output:
        text.commit(token)


def _recycle(target: Target, reply: SeenReply, confidence: RankConfidence) -> None:
    successors = Successors()
    successors.read(reply.prompt)
    last = reply.prompt[-1]
    for token, logits_V in zip(reply.output, _logits(target, reply), strict=True):
        if (row := successors.get(last)) is not None:
            confidence.record(row, token)
        successors.update(last, likeliest(logits_V, NUM_CANDIDATES))
        last = token


def _logits(target: Target, reply: SeenReply) -> Iterator[Tensor]:
    """[V] before each token of the output."""
    slot = target.cache.allocate()
    try:
        read(target, slot, reply.prompt[:-1])
        text = [reply.prompt[-1], *reply.output[:-1]]
        for start in range(0, len(text), _CHUNK):
            first, *others = text[start : start + _CHUNK]
            scores = target.score([ScoreRow(slot, [first], TokenTree.chain(others))])
            target.cache.keep(slot, 1, range(len(others)))
            yield from scores.logits_NV
    finally:
        target.cache.free(slot)


def _shares(confidence: MatchConfidence, prior: Sequence[float]) -> tuple[float, ...]:
    """Hit rates of all classes, of which there are as many as in the prior."""
    return _rounded([confidence.of_class(group) for group in range(len(prior))])


def _rounded(shares: Sequence[float]) -> tuple[float, ...]:
    """To what such figures can say; never to 0 or 1."""
    return tuple(min(0.999, max(0.001, round(share, 3))) for share in shares)


@o.with_options
def priors(
    load: Annotated[LoadOptions, loading(drafter="none", draft_model=None, max_batch_size=8)],
    prompts: Prompts = None,
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 512,
    write: Annotated[
        Path | None, typer.Option(help="Where to put them, as JSON; printed otherwise.")
    ] = None,
) -> None:
    """How often the guesses of copying drafters are right, on greedy replies of the model.

    The package's own (foredraft/drafters/text/priors.json) are what this gives on the default
    model and the built-in prompts. They are a beginning: each text corrects them as it goes.
    """
    texts = load_prompts(prompts, limit)
    llm = o.load_llm(load)
    replies = [
        reply
        for start in range(0, len(texts), 8)
        for reply in _written(llm, texts[start : start + 8], max_tokens)
    ]
    with progress_bar(len(replies)) as advance:
        shares = measure_priors(llm.target, replies, advance)
    num_tokens = sum(len(reply.output) for reply in replies)
    source = "the built-in prompts" if prompts is None else Path(prompts).name
    made_by = f"python -m benchmarks priors --max-tokens {max_tokens}"
    made_of = f"{num_tokens} tokens of {load.model} on {source}"
    text = as_json(shares, {"made_by": made_by, "made_of": made_of})
    if write is None:
        typer.echo(text, nl=False)
    else:
        write.write_text(text, encoding="utf-8")


def as_json(shares: Priors, notes: dict[str, str]) -> str:
    """What `Priors.parse` reads, with ``notes`` on where it is from."""
    lines = [f'  "{name}": {json.dumps(value)}' for name, value in (notes | asdict(shares)).items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _written(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[SeenReply]:
    """Greedy replies, each with the document that its prompt holds behind a blank line."""
    assert llm.tokenizer is not None
    ids = [prompt_ids(llm, prompt) for prompt in prompts]
    documents = [prompt.text.partition("\n\n")[2] for prompt in prompts]
    expected = [llm.tokenizer.encode(text, add_special_tokens=False) for text in documents]
    results = llm.generate(ids, SamplingParams(max_tokens=max_tokens))
    return [*map(SeenReply, ids, (result.token_ids for result in results), expected)]
