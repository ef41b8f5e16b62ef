"""Tokens that a grammar allows at a position of the text, committed or drafted.

A matcher reads tokens one after the other. One matcher reads the committed tokens and nothing else.
A copy of it reads the tokens of a draft; for another branch a new copy is made. Matchers never take
tokens back: a copy is as cheap, and llguidance (1.9) can lose a token that way once it has made a
mask. Masks are kept until the next commit, because a drafter and verification ask for the same
positions.

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
"""Most tokens that `GrammarRule.forced` looks ahead."""


class Matcher(Protocol):
    """Reads a reply by a grammar. It raises `GrammarError`, which ends the request."""

    def mask(self) -> Array:
        """Which tokens may come next: bool [V]."""

    def permits(self, token: int) -> bool:
        """Whether a token may come next. Tokens that end the text count, too."""

    def consume(self, token: int) -> bool:
        """Read a token. False: it may not come or ends the text; do not use the matcher again."""

    def copy(self) -> Matcher:
        """An independent matcher that has read the same tokens."""

    def forced(self) -> Sequence[int]:
        """The tokens of the only text that can follow; none where there is a choice."""

    def is_complete(self) -> bool:
        """Whether no token can follow."""


class GrammarRule:
    """Follows one request's reply.

    Args:
        matcher: of this request alone, at the beginning.
        end_ids: tokens that end the reply: nothing follows them.
        num_prompt: tokens of the prompt, with which each text begins.
    """

    def __init__(self, matcher: Matcher, end_ids: frozenset[int], num_prompt: int) -> None:
        self._beginning, self._end_ids, self._num_prompt = matcher, end_ids, num_prompt
        self._settled, self._num_settled = matcher, 0  # behind the committed tokens
        self._ahead: Matcher | None = None  # behind those of `_path`, too
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Array | None] = {}

    def mask(self, text: Sequence[int], drafted: Sequence[int]) -> Array | None:
        """Which tokens may come after these: bool [V]; None if the grammar does not allow these.

        Raises:
            GrammarError: the parser of the grammar outgrows its bounds here.
        """
        self._settle(text)
        path = tuple(drafted)
        if path not in self._masks:
            ahead = self._follow(path)
            self._masks[path] = None if ahead is None else ahead.mask()
        return self._masks[path]

    def permits(self, token: int, text: Sequence[int], drafted: Sequence[int]) -> bool:
        """Whether a token may come after these; far cheaper than a mask."""
        self._settle(text)
        ahead = self._follow(drafted)
        return ahead is not None and ahead.permits(token)

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        """Tokens that follow the text, as far as the grammar allows one continuation only.

        A text of several tokens is tokenised as the tokenizer would.
        """
        chain: list[int] = []
        while len(chain) < _MAX_FORCED:
            mask_V = self.mask(text, chain)
            ahead = self._go_to(chain)
            if mask_V is None or ahead is None or ahead.is_complete():
                break
            found = list(ahead.forced())
            if not found and np.count_nonzero(mask_V) == 1:
                found = [int(mask_V.argmax())]
            if not found:
                break
            chain += found
        return chain[:_MAX_FORCED]

    def is_complete(self, text: Sequence[int]) -> bool:
        """Whether nothing but the end can follow the text."""
        self._settle(text)
        return self._settled.is_complete()

    def _settle(self, text: Sequence[int]) -> None:
        """Read what has been committed since the last time."""
        num_reply = len(text) - self._num_prompt
        if num_reply == self._num_settled:
            return
        self._masks.clear()
        self._ahead = None
        if num_reply < self._num_settled:  # another text
            self._settled, self._num_settled = self._beginning, 0
        settled = self._settled.copy()
        for token in text[self._num_prompt + self._num_settled :]:
            if not settled.consume(token):
                raise GrammarError(f"the reply of {num_reply} tokens does not follow its grammar")
        self._settled, self._num_settled = settled, num_reply

    def _follow(self, path: Sequence[int]) -> Matcher | None:
        """A matcher after these guesses; None if no token can come there."""
        return None if path and path[-1] in self._end_ids else self._go_to(path)

    def _go_to(self, path: Sequence[int]) -> Matcher | None:
        """A matcher after the committed tokens and these; None if they cannot be read."""
        if self._ahead is None or [*path[: len(self._path)]] != self._path:
            self._ahead, self._path = self._settled.copy(), []
        for token in path[len(self._path) :]:
            if not self._ahead.consume(token):
                self._ahead = None
                return None
            self._path.append(token)
        return self._ahead
