"""Tokens that may not come: those not allowed, the ends of bad words, ends that come too soon.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from foredraft.core.params import ThinkingLimit

Array: TypeAlias = npt.NDArray[Any]


class Ban(Protocol):
    """Names tokens that cannot come next.

    A reply is handed over as its length and its end, drafted tokens included: all of a long one
    would be copied for each position.

    Attributes:
        num_ending: how many of the reply's last tokens the ban looks at.
    """

    @property
    def num_ending(self) -> int: ...

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        """Put the logits of banned tokens to -inf.

        Args:
            num_reply: how many tokens have been generated before the position.
            ending: the last of them, at least ``num_ending`` if there are so many.
        """

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        """Whether a token is not banned there."""


class AllowedTokens:
    """No other tokens than these.

    Args:
        tokens: below ``vocab_size``.
    """

    num_ending = 0

    def __init__(self, tokens: Iterable[int], vocab_size: int) -> None:
        self._banned_V = np.ones(vocab_size, dtype=bool)
        self._banned_V[list(tokens)] = False

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        logits_V[self._banned_V] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return not self._banned_V[token]


class BadWords:
    """The last token of a sequence is banned where the reply ends with the others.

    As in vLLM the prompt does not count: it may hold a bad word's beginning, or all of it.

    Args:
        sequences: of one token or more each.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._single: set[int] = set()
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self.num_ending = 0
        for *beginning, last in sequences:
            self.num_ending = max(self.num_ending, len(beginning))
            if beginning:
                self._after.setdefault(beginning[-1], []).append((tuple(beginning), last))
            else:
                self._single.add(last)

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        logits_V[list(self._banned(ending))] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return token not in self._banned(ending)

    def _banned(self, ending: Sequence[int]) -> Collection[int]:
        candidates = self._after.get(ending[-1], ()) if ending else ()
        return self._single.union(
            last for beginning, last in candidates if tuple(ending[-len(beginning) :]) == beginning
        )


class NoEndYet:
    """Nothing that ends the reply, until it has ``min_tokens`` tokens."""

    num_ending = 0

    def __init__(self, min_tokens: int, stop_ids: Iterable[int]) -> None:
        self._min_tokens, self._stop_ids = min_tokens, sorted(stop_ids)

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        if num_reply < self._min_tokens:
            logits_V[self._stop_ids] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return num_reply >= self._min_tokens or token not in self._stop_ids


class OnlyAt:
    """One token, and no other, at a position of the reply; the first is 0."""

    num_ending = 0

    def __init__(self, position: int, token: int) -> None:
        self._position, self._token = position, token

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        if num_reply == self._position:
            logits_V[: self._token] = logits_V[self._token + 1 :] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return num_reply != self._position or token == self._token


class ThinkingEnds:
    """Behind the most tokens of thoughts comes what ends them, unless they are over."""

    def __init__(self, limit: ThinkingLimit) -> None:
        self._limit = limit
        self.num_ending = limit.num_tokens + len(limit.end)

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        token = self._required(num_reply, ending)
        if token is not None:
            logits_V[:token] = logits_V[token + 1 :] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return self._required(num_reply, ending) in (None, token)

    def _required(self, num_reply: int, reply: Sequence[int]) -> int | None:
        """The only token that may come; the reply so far is whole where that matters."""
        limit = self._limit
        place = num_reply - limit.num_tokens
        if not 0 <= place < len(limit.end) or limit.end[0] in reply[: limit.num_tokens]:
            return None
        is_thinking = tuple(reply[: len(limit.begin)]) == limit.begin
        return limit.end[place] if is_thinking else None


class NeverAt:
    """Bans some tokens at one position of the reply."""

    num_ending = 0

    def __init__(self, position: int, tokens: Iterable[int]) -> None:
        self._position, self._tokens = position, sorted(tokens)

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        if num_reply == self._position:
            logits_V[self._tokens] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return num_reply != self._position or token not in self._tokens


@dataclass(frozen=True)
class ModelBans:
    """Tokens that a model's own generation config rules out, for every request.

    Attributes:
        never: tokens that never come (``suppress_tokens``).
        never_at: a position of the reply, and tokens that do not come there
            (``begin_suppress_tokens``).
        first: the only token that begins a reply (``forced_bos_token_id``).
        last: the only token at the limit of a reply's length (``forced_eos_token_id``).
    """

    never: tuple[int, ...] = ()
    never_at: tuple[int, tuple[int, ...]] = (0, ())
    first: int | None = None
    last: int | None = None

    def of_reply(self, max_tokens: int) -> Iterator[Ban]:
        """The bans of one reply."""
        if self.never:
            yield BadWords([token] for token in self.never)
        if self.never_at[1]:
            yield NeverAt(*self.never_at)
        if self.first is not None:
            yield OnlyAt(0, self.first)
        if self.last is not None:
            yield OnlyAt(max_tokens - 1, self.last)
