"""The tokens that a draft model may draft: frequent ones, and those of the request's own text.

The LM head over a large vocabulary takes a fifth of a small model's forward. BPE ids are in the
order of merges, so the first ids are the frequent tokens; no corpus has to be counted, as FR-Spec
does (Zhao et al., arXiv 2502.14856). A rare token of the prompt is likely to come again, so the
tokens of the text join the list. If a text brings many rare tokens, as other scripts do, the model
may draft every token. The text never depends on the list: a proposal may leave tokens out.
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
    """The rare tokens of a request's text.

    Attributes:
        num_seen: tokens of the text that were read.
        first_places: the first position of each rare id, the most recent id last.
    """

    num_seen: int = 0
    first_places: dict[int, int] = field(default_factory=dict)


class Shortlists:
    """One for each request.

    Args:
        num_first: the number of frequent tokens; 0: every token may be drafted.
    """

    def __init__(self, num_first: int) -> None:
        self.num_first = num_first
        self._texts: dict[int, _Text] = {}

    def of(self, request_id: int, tokens: Sequence[int]) -> Shortlist | None:
        """The shortlist of a request whose text is ``tokens``; None: every token may be drafted."""
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
