"""A draft model's cache: a slot a request, rewound before each draft to what was committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.core.tree import EMPTY_TREE, TokenTree
from foredraft.models.base import Target, read

_MOST_PENDING = 512
"""A longer text is read but for its end, so that a draft forward stays small."""


@dataclass
class _Slot:
    """One request's slot.

    Attributes:
        number: of the slot in the cache.
        cached: the tokens whose entries it holds.
        num_confirmed: how many of them are known to be committed.
    """

    number: int
    cached: list[int] = field(default_factory=list)
    num_confirmed: int = 0

    def rewind(self, tokens: Sequence[int]) -> None:
        """Forget cached tokens that were not committed; the last of ``tokens`` stays pending."""
        limit = min(len(self.cached), len(tokens) - 1)
        agreed = min(self.num_confirmed, limit)
        if self.cached[:agreed] != list(tokens[:agreed]):  # a translated text may be rewritten
            agreed = 0
        while agreed < limit and self.cached[agreed] == tokens[agreed]:
            agreed += 1
        del self.cached[agreed:]
        self.num_confirmed = agreed


class DraftCache:
    """The requests' slots in the cache of a draft model.

    Args:
        model: the draft model.
    """

    def __init__(self, model: Target) -> None:
        self._model, self._cache = model, model.cache
        self._slots: dict[int, _Slot] = {}

    def begin(self, request_id: int) -> None:
        self._slots[request_id] = _Slot(self._cache.allocate())

    def end(self, request_id: int) -> None:
        self._cache.free(self._slots.pop(request_id).number)

    def slot(self, request_id: int) -> int:
        return self._slots[request_id].number

    def catch_up(self, request_id: int, tokens: Sequence[int]) -> list[int]:
        """Drop what was rejected since the last draft; return what is to be read.

        Args:
            tokens: all committed tokens; never empty, and neither is the result. Of a long text
                all but the end is read here.
        """
        slot = self._slots[request_id]
        slot.rewind(tokens)
        self._cache.truncate(slot.number, slot.num_confirmed)
        pending = list(tokens[slot.num_confirmed :])
        num_early = (len(pending) - 1) // _MOST_PENDING * _MOST_PENDING
        read(self._model, slot.number, pending[:num_early])
        slot.cached += pending[:num_early]
        return pending[num_early:]

    def keep(
        self,
        request_id: int,
        pending: Sequence[int],
        tree: TokenTree = EMPTY_TREE,
        path: Sequence[int] = (),
    ) -> None:
        """Keep what the last forward read: ``pending`` and the nodes of ``path``."""
        slot = self._slots[request_id]
        self._cache.keep(slot.number, len(pending), path)
        slot.cached += [*pending, *(tree.tokens[node] for node in path)]
