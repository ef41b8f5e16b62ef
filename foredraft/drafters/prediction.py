"""Predicted output: copy a text that the user expects the reply to repeat.

A rewritten file, a corrected letter, a form filled in again: most of the reply is known before it
is written. The draft follows that text; where the reply departs from it, the drafter looks for the
place where the two meet again. (The idea of OpenAI's Predicted Outputs, 2024; here a wrong
prediction costs nothing but its own scoring, and changes no token.) An encoder-decoder's reply is
expected to repeat its source: that is aggressive decoding (Sun et al., arXiv 2106.04970), whose
place to go on from is the only one where the last tokens occur in the source.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property

from foredraft.core.errors import ConfigError
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.guide import Guide
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.text.confidence import MatchConfidence, priors
from foredraft.drafters.text.per_request import GuidedDrafter

_SETTLED = 4
"""Tokens that must agree before the place of parting is forgotten."""
_MAX_COMPARED = 24
"""Longest agreement looked for backwards when the texts meet again."""
_MAX_OCCURRENCES = 8
"""Occurrences of a token tried on either side of the place of parting, nearest first."""

_Place = tuple[int, int]
"""Position of the next expected token, and how many tokens have agreed before it."""
_NOWHERE: _Place = (1 << 62, 0)


class AlignmentConfidence:
    """How often an expected token comes, in the classes of `MatchConfidence`; see `Priors`."""

    def __init__(self) -> None:
        known = priors()
        self.followed = MatchConfidence(known.followed)
        self.met = MatchConfidence(known.met)
        self.replaced = MatchConfidence(known.replaced)
        self.inserted = MatchConfidence(known.inserted)


class PredictedText(Guide):
    """One request's output, aligned with the text that it is expected to repeat.

    While the two agree, one position is followed. When they part, up to three guesses are kept:
    the expected text goes on where it was left (the output inserted something); it goes on after
    as many tokens as were written since (the output replaced them); or it goes on after the place
    that agrees longest with the last tokens. Only when a few tokens in a row have agreed is the
    place of parting forgotten: a common phrase must not carry the alignment off for good.

    Args:
        expected: the ids of that text.
        confidence: hit rates of such guesses; the priors alone when None.
    """

    place: _Place | None = None

    def __init__(
        self, expected: Sequence[int], confidence: AlignmentConfidence | None = None
    ) -> None:
        self._expected, self._known = expected, confidence or AlignmentConfidence()
        self._output: list[int] = []
        self._next, self._agreed = 0, 0  # the position followed, tokens agreed before it
        self._left_at, self._num_apart = 0, 0  # where the texts parted, tokens written since

    @cached_property
    def _positions(self) -> dict[tuple[int, ...], list[int]]:
        """Where n-grams of one and two tokens end in the expected text."""
        found: dict[tuple[int, ...], list[int]] = {}
        for position, token in enumerate(self._expected):
            found.setdefault((token,), []).append(position)
            if position:
                found.setdefault((self._expected[position - 1], token), []).append(position)
        return found

    def commit(self, token: int) -> None:
        for position, confidence, length in self._guesses():
            confidence.record(length, self._expected[position] == token)
        self._output.append(token)
        if self._follows(token):
            self._next += 1
            self._agreed += 1
            self._num_apart += self._num_apart > 0
        else:
            if not self._num_apart:
                self._left_at = self._next
            self._num_apart += 1
            self._next, self._agreed = self._best_agreement()
        if self._agreed >= _SETTLED:
            self._num_apart = 0

    def _follows(self, token: int) -> bool:
        if self._num_apart and not self._agreed:
            return False
        return self._next < len(self._expected) and self._expected[self._next] == token

    def _best_agreement(self) -> tuple[int, int]:
        """The position after the longest agreement with the end of the output, and its length.

        Of equals the one nearest to the place of parting counts.
        """
        best, longest = 0, 0
        for size in (2, 1):
            for position in self._nearest(tuple(self._output[-size:])):
                agreed = self._agreement(position)
                if agreed > longest:
                    best, longest = position + 1, agreed
            if longest:
                break
        return best, longest

    def _nearest(self, ngram: tuple[int, ...]) -> list[int]:
        """Occurrences of ``ngram``, those nearest to the place of parting first."""
        positions, near = self._positions.get(ngram, []), self._left_at + self._num_apart
        middle = bisect_left(positions, near)
        found = positions[max(0, middle - _MAX_OCCURRENCES) : middle + _MAX_OCCURRENCES]
        return sorted(found, key=lambda position: abs(position + 1 - near))

    def _agreement(self, position: int) -> int:
        """Number of tokens, up to and at ``position``, that equal the end of the output."""
        longest = min(_MAX_COMPARED, position + 1, len(self._output))
        for agreed in range(1, longest):
            if self._expected[position - agreed] != self._output[-1 - agreed]:
                return agreed
        return longest

    def _guesses(self) -> list[tuple[int, MatchConfidence, int]]:
        """Positions of the next expected token, each with the estimate that holds for it."""
        if self._agreed > 1 or not self._num_apart:
            guesses = [(self._next, self._known.followed, self._agreed)]
        else:
            apart = self._num_apart
            guesses = [
                (self._left_at + apart, self._known.replaced, apart),
                (self._left_at, self._known.inserted, apart),
            ]
            if self._agreed:
                guesses.append((self._next, self._known.met, abs(self._next - self._left_at)))
        return [guess for guess in guesses if guess[0] < len(self._expected)]

    def successors(self, place: _Place | None) -> Iterator[tuple[int, float, _Place]]:
        """Tokens that may come at ``place``, likeliest first; None is the end of the output."""
        if place is None:
            found: dict[int, tuple[int, float, _Place]] = {}
            for position, confidence, length in self._guesses():
                token, prob = self._expected[position], confidence[length]
                if token not in found or prob > found[token][1]:
                    found[token] = (token, prob, (position + 1, self._agreed + 1))
            yield from sorted(found.values(), key=lambda candidate: -candidate[1])
        elif place[0] < len(self._expected):
            position, agreed = place
            yield self._expected[position], self._known.followed[agreed], (position + 1, agreed + 1)

    def advance(self, place: _Place | None, token: int) -> _Place:
        """The cursor after ``token``; an unexpected token has no successors."""
        return next((after for t, _, after in self.successors(place) if t == token), _NOWHERE)


def _build(context: DrafterContext) -> Drafter:
    tokenizer, vocab_size = context.tokenizer, context.target.vocab_size

    def expected(row: DraftRow) -> Sequence[int]:
        """The ids of the request's prediction; without one, those of its source or prompt."""
        text = row.params.prediction
        if text is None:
            return (row.source.token_ids if row.source else ()) or row.tokens
        if tokenizer is None:
            raise ConfigError(
                "a prediction is text and this engine has no tokenizer; leave the prediction out"
            )
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [token for token in ids if token < vocab_size]

    tree = context.target.capabilities.tree_attention
    return GuidedDrafter(lambda row: PredictedText(expected(row)), tree)


DRAFTER = DrafterSpec(
    build=_build,
    summary="copies the text the user expects (SamplingParams.prediction), and finds back to it",
    copies=True,
    reads_prediction=True,
    num_draft_tokens=16,
)
