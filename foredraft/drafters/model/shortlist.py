"""The tokens that a draft model may name: frequent ones, and those of the request's own text.

A product with all rows of a large vocabulary is a fifth of a small model's forward. The ids of BPE
are in the order of merges, so the first ones are the frequent ones without a corpus (FR-Spec, Zhao
et al., arXiv 2502.14856, counts one). What a prompt is about is rare and comes up again, so
the text's other tokens are kept, too; and where a text brings many of them, as in other scripts,
the draft model may name all. The text never depends on it: a proposal may leave tokens out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from foredraft.models.base import MOST_OTHERS, Shortlist

FREQUENT = 65_536
"""Of 151,936 tokens: half of these saves no more time than it loses drafts."""
_RECENT, _MANY = 64, 8
"""In a text that has brought so many rare tokens among its last ones, more are to come."""


@dataclass
class _Text:
    """What has been seen of a request's text.

    Attributes:
        num_seen: tokens.
        first_places: of rare ids, the one that came up last is the last one.
    """

    num_seen: int = 0
    first_places: dict[int, int] = field(default_factory=dict)


class Shortlists:
    """One for each request.

    Args:
        num_first: ids of frequent tokens; 0: every token may be named.
    """

    def __init__(self, num_first: int) -> None:
        self.num_first = num_first
        self._texts: dict[int, _Text] = {}

    def of(self, request_id: int, tokens: Sequence[int]) -> Shortlist | None:
        """For a request whose text this is now; None: every token may be named."""
        if not self.num_first:
            return None
        text = self._texts.setdefault(request_id, _Text())
        places = text.first_places
        for place in range(text.num_seen, len(tokens)):
            token = tokens[place]
            if token >= self.num_first:
                places[token] = places.pop(token, place)
        text.num_seen = len(tokens)
        if sum(place >= len(tokens) - _RECENT for place in places.values()) >= _MANY:
            return None
        return Shortlist(self.num_first, tuple(islice(reversed(places), MOST_OTHERS)))

    def end(self, request_id: int) -> None:
        self._texts.pop(request_id, None)
