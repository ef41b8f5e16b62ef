"""Measures the first estimates of drafters that copy, on texts that a model wrote.

Whether a guess would have been right shows on the finished text: nothing is drafted and nothing
timed. What was known before counts as a few observations, so that classes which hardly occur keep
a sensible value.

Shape legend: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.drafters.confidence import MatchConfidence, Priors, priors
from foredraft.drafters.prediction import Alignment, Experience
from foredraft.drafters.suffix import NO_MATCH, SEPARATOR, Source, SuffixAutomaton
from foredraft.drafters.token_recycling import RankConfidence, Successors, likeliest
from foredraft.models.base import ScoreRow, Target, read

_CHUNK = 64


@dataclass(frozen=True)
class Reply:
    """A text to measure on.

    Attributes:
        prompt, output: token ids.
        expected: what the output was expected to repeat; empty if nothing.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    expected: Sequence[int] = ()


def measure_priors(
    target: Target, replies: Sequence[Reply], advance: Callable[[str], None]
) -> Priors:
    """Shares of right guesses on ``replies``; those before count as other texts.

    Args:
        target: what wrote them; it says which tokens came near.
        advance: told after each reply.
    """
    known = priors()
    repeated, other = MatchConfidence(known.repeated_text), MatchConfidence(known.other_text)
    experience, ranks, earlier = Experience(), RankConfidence(), SuffixAutomaton()
    for reply in replies:
        _match_itself(reply, repeated)
        _match_earlier(reply, earlier, other)
        _align(reply, experience)
        _recycle(target, reply, ranks)
        advance("measuring")
    return Priors(
        repeated_text=_rounded(repeated.shares),
        other_text=_rounded(other.shares),
        followed=_rounded(experience.followed.shares),
        met=_rounded(experience.met.shares),
        replaced=_rounded(experience.replaced.shares),
        inserted=_rounded(experience.inserted.shares),
        ranks=tuple(map(_rounded, ranks.shares)),
    )


def _match_itself(reply: Reply, confidence: MatchConfidence) -> None:
    text = SuffixAutomaton()
    source = Source(text, confidence)
    for token in reply.prompt:
        text.extend(token)
    for token in reply.output:
        source.record(text.end, token)
        text.extend(token)


def _match_earlier(reply: Reply, earlier: SuffixAutomaton, confidence: MatchConfidence) -> None:
    source, match = Source(earlier, confidence), NO_MATCH
    for token in reply.output:
        source.record(earlier.with_followers(match), token)
        match = earlier.advance(match, token)
    for token in (*reply.output, SEPARATOR):
        earlier.extend(token)


def _align(reply: Reply, experience: Experience) -> None:
    if not reply.expected:
        return
    alignment = Alignment(reply.expected, experience)
    for token in reply.output:
        alignment.commit(token)


def _recycle(target: Target, reply: Reply, confidence: RankConfidence) -> None:
    successors = Successors(len(confidence.shares[0]))
    successors.read(reply.prompt)
    last = reply.prompt[-1]
    for token, logits_V in zip(reply.output, _logits(target, reply), strict=True):
        if (row := successors.get(last)) is not None:
            confidence.record(row, token)
        successors.update(last, likeliest(logits_V, successors.num_candidates))
        last = token


def _logits(target: Target, reply: Reply) -> Iterator[Tensor]:
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


def _rounded(shares: Sequence[float]) -> tuple[float, ...]:
    """To what such figures can say; never to 0 or 1."""
    return tuple(min(0.999, max(0.001, round(share, 3))) for share in shares)
