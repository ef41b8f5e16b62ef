"""What a table and the text's own repetitions say together about the next token.

Shares of both are added with fixed weights, which names more tokens right than either alone. How
likely the sum is right depends on who agrees; it is measured on held-out text when the table is
learnt, and followed on the text itself (as `foredraft.drafters.common.confidence` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foredraft.drafters.common.confidence import MatchConfidence
from foredraft.drafters.suffix import SuffixPlace, SuffixText
from foredraft.drafters.table.ngrams import LONGEST, Context, NgramTable

NUM_CLASSES = 10
"""Of chances, by tenths."""
ALONE, AGREED, PARTED = range(3)
"""Situations: only one of both names anything; both name the same token first; they do not."""
SITUATIONS = 3
NO_SHARES = dict.fromkeys(("greedy", "sampled"), [[0.5] * NUM_CLASSES] * SITUATIONS)
"""Of a table that nobody has measured."""
_COPY_WEIGHT = 2.0 / 3.0
"""Fitted to the share named right in held-out replies of a small chat model: 0.706 of greedy ones,
where the larger of both opinions named 0.691."""
_MOST = 0.99
_PRIOR_WEIGHT = 24.0
_REMEMBERED = 1024
"""Contexts whose successors a request keeps."""

TablePlace = tuple[SuffixPlace, Context]


@dataclass(frozen=True)
class Opinion:
    """About one place.

    Attributes:
        chances: of tokens, likeliest first, before they are corrected.
        places: where the text's own matches go on, for the tokens that they name.
        situation: see `ALONE`.
    """

    chances: Sequence[tuple[int, float]]
    places: dict[int, SuffixPlace]
    situation: int

    @property
    def first(self) -> int:
        return self.chances[0][0]

    @property
    def chance_class(self) -> int:
        return min(NUM_CLASSES - 1, int(self.chances[0][1] * NUM_CLASSES))


class TableText:
    """One request's text, and what may follow it. A `foredraft.drafters.common.growing.Guide`.

    Args:
        prompt: the text so far.
        table: of the target.
        is_sampled: whether what follows is drawn at a temperature above 0.

    Attributes:
        place: where the committed text ends.
    """

    def __init__(self, prompt: Sequence[int], table: NgramTable, is_sampled: bool) -> None:
        self._own, self._table = SuffixText(prompt), table
        shares = table.shares["sampled" if is_sampled else "greedy"]
        self._confidence = [MatchConfidence(row, _PRIOR_WEIGHT) for row in shares]
        self._named: dict[Context, list[tuple[int, float]]] = {}
        self.place: TablePlace = (self._own.place, tuple(prompt[-LONGEST:]))

    def opinion(self, place: TablePlace) -> Opinion:
        """What may follow a place."""
        copied, named = list(self._own.successors(place[0])), self._named_after(place[1])
        places = {token: following for token, _, following in copied}
        if not copied or not named:
            return Opinion(named or [(token, chance) for token, chance, _ in copied], places, ALONE)
        chances = {token: (1.0 - _COPY_WEIGHT) * chance for token, chance in named}
        for token, chance, _ in copied:
            chances[token] = chances.get(token, 0.0) + _COPY_WEIGHT * chance
        ranked = sorted(chances.items(), key=lambda pair: -pair[1])
        return Opinion(ranked, places, AGREED if copied[0][0] == named[0][0] else PARTED)

    def _named_after(self, context: Context) -> list[tuple[int, float]]:
        """What the table says: places are asked about as drafts, as roots and as committed text."""
        named = self._named.get(context)
        if named is None:
            if len(self._named) >= _REMEMBERED:
                self._named.clear()
            named = self._named[context] = self._table.successors(context)
        return named

    def successors(self, place: TablePlace) -> Iterator[tuple[int, float, TablePlace]]:
        """Tokens that may follow, likeliest first, each with its chance and its place."""
        opinion = self.opinion(place)
        if not opinion.chances:
            return
        first = opinion.chances[0][1]
        share = self._confidence[opinion.situation].of_class(opinion.chance_class)
        factor = min(share / first, _MOST / sum(chance for _, chance in opinion.chances))
        for token, chance in opinion.chances:
            own = opinion.places.get(token)
            yield token, factor * chance, self._advanced(place, token, own)

    def advance(self, place: TablePlace, token: int) -> TablePlace:
        """Where ``token`` leads from ``place``."""
        return self._advanced(place, token, None)

    def _advanced(self, place: TablePlace, token: int, own: SuffixPlace | None) -> TablePlace:
        following = self._own.advance(place[0], token) if own is None else own
        return following, (*place[1], token)[-LONGEST:]

    def commit(self, token: int) -> None:
        """Append a committed token, after seeing whether it was foreseen."""
        opinion = self.opinion(self.place)
        if opinion.chances:
            confidence = self._confidence[opinion.situation]
            confidence.record_class(opinion.chance_class, opinion.first == token)
        self._own.commit(token)
        self.place = self._own.place, (*self.place[1], token)[-LONGEST:]
