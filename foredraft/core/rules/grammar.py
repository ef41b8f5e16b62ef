"""What a grammar allows at a place of the text, committed or drafted.

A matcher reads tokens one after the other and can take them back. It is left where it was asked
last and moved to where it is asked next by the tokens in which the two differ, so following a path
of a tree costs no more than the path. Masks are kept until the next commit: a drafter asks for the
same places as verification.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from foredraft.core.errors import GrammarError

Array: TypeAlias = npt.NDArray[Any]

_MAX_FORCED = 32
"""Tokens looked ahead for what alone can follow."""


class Matcher(Protocol):
    """Reads a reply by a grammar. What it raises is a `GrammarError`, and ends the request."""

    def mask(self) -> Array:
        """Which tokens may come next: bool [V]."""
        ...

    def permits(self, token: int) -> bool:
        """Whether a token may come next, one that ends the text included."""
        ...

    def consume(self, token: int) -> bool:
        """Read a token; False, and nothing is read, if it may not come or ends the text."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last tokens back."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that spell what alone can follow; none where there is a choice."""
        ...

    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        ...


class GrammarRule:
    """Follows one request's reply.

    Args:
        matcher: of this request alone, at the beginning.
        end_ids: tokens that end the reply: nothing follows them.
    """

    def __init__(self, matcher: Matcher, end_ids: frozenset[int]) -> None:
        self._matcher, self._end_ids = matcher, end_ids
        self._read: list[int] = []
        self._num_settled = 0  # tokens read that are committed
        self._masks: dict[tuple[int, ...], Array | None] = {}

    def mask(self, reply: Sequence[int], drafted: Sequence[int]) -> Array | None:
        """Which tokens may come after these: bool [V]; None where nothing can have led there.

        Raises:
            GrammarError: the grammar is too complex to say.
        """
        self._settle(reply)
        path = tuple(drafted)
        if path not in self._masks:
            self._masks[path] = self._matcher.mask() if self._follows(path) else None
        return self._masks[path]

    def permits(self, token: int, reply: Sequence[int], drafted: Sequence[int]) -> bool:
        """Whether a token may come after these; far cheaper than a mask."""
        self._settle(reply)
        return self._follows(drafted) and self._matcher.permits(token)

    def forced(self, reply: Sequence[int]) -> Sequence[int]:
        """What follows the reply, as far as the grammar leaves next to no choice.

        Of several ways to spell one text it is the tokenizer's own.
        """
        chain: list[int] = []
        while len(chain) < _MAX_FORCED:
            mask_V = self.mask(reply, chain)
            if mask_V is None or not self._go_to(chain) or self._matcher.is_complete():
                break
            found = list(self._matcher.forced())
            if not found and np.count_nonzero(mask_V) == 1:
                found = [int(mask_V.argmax())]
            if not found:
                break
            chain += found
        return chain[:_MAX_FORCED]

    def is_complete(self, reply: Sequence[int]) -> bool:
        """Whether nothing but the end can follow the reply."""
        self._settle(reply)
        return self._go_to(()) and self._matcher.is_complete()

    def _settle(self, reply: Sequence[int]) -> None:
        """Read what has been committed since the last time."""
        if len(reply) == self._num_settled:
            return
        self._masks.clear()
        if len(reply) < self._num_settled:  # another text
            self._num_settled = 0
        if not self._go_to(reply[self._num_settled :]):
            raise GrammarError(f"the reply of {len(reply)} tokens does not follow its grammar")
        self._num_settled = len(reply)

    def _follows(self, path: Sequence[int]) -> bool:
        """Whether anything can come behind these guesses; the matcher is behind them then."""
        return not (path and path[-1] in self._end_ids) and self._go_to(path)

    def _go_to(self, path: Sequence[int]) -> bool:
        """Move the matcher behind the committed tokens and these; False if it cannot read them."""
        common = self._num_settled
        for token in path:
            if common == len(self._read) or self._read[common] != token:
                break
            common += 1
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
            del self._read[common:]
        for token in path[common - self._num_settled :]:
            if not self._matcher.consume(token):
                return False
            self._read.append(token)
        return True
