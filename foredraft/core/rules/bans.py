"""Tokens that may not come: those not allowed, the ends of bad words, ends that come too soon.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
        vocab_size: tokens behind so many are not allowed either.
    """

    num_ending = 0

    def __init__(self, tokens: Iterable[int], vocab_size: int) -> None:
        self._banned_V = np.ones(vocab_size, dtype=bool)
        self._banned_V[list(tokens)] = False

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        logits_V[: len(self._banned_V)][self._banned_V] = -np.inf
        logits_V[len(self._banned_V) :] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return token < len(self._banned_V) and not self._banned_V[token]


@dataclass(frozen=True)
class Banned:
    """Some tokens may not come.

    Attributes:
        tokens: those, by the reply's length and end.
    """

    tokens: Callable[[int, Sequence[int]], Collection[int]]
    num_ending: int = 0

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        logits_V[list(self.tokens(num_reply, ending))] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return token not in self.tokens(num_reply, ending)


@dataclass(frozen=True)
class Required:
    """One token, and no other.

    Attributes:
        token: that, by the reply's length and end; None: any may come.
    """

    token: Callable[[int, Sequence[int]], int | None]
    num_ending: int = 0

    def apply(self, logits_V: Array, num_reply: int, ending: Sequence[int]) -> None:
        token = self.token(num_reply, ending)
        if token is not None:
            logits_V[:token] = logits_V[token + 1 :] = -np.inf

    def permits(self, token: int, num_reply: int, ending: Sequence[int]) -> bool:
        return self.token(num_reply, ending) in (None, token)


def bad_words(sequences: Iterable[Sequence[int]]) -> Banned:
    """The last token of a sequence is banned where the reply ends with the others.

    As in vLLM the prompt does not count: it may hold a bad word's beginning, or all of it.

    Args:
        sequences: of one token or more each.
    """
    single: set[int] = set()
    after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    num_ending = 0
    for *beginning, last in sequences:
        num_ending = max(num_ending, len(beginning))
        if beginning:
            after.setdefault(beginning[-1], []).append((tuple(beginning), last))
        else:
            single.add(last)

    def banned(num_reply: int, ending: Sequence[int]) -> Collection[int]:
        candidates = after.get(ending[-1], ()) if ending else ()
        return single.union(
            last for beginning, last in candidates if tuple(ending[-len(beginning) :]) == beginning
        )

    return Banned(banned, num_ending)


def no_end_before(min_tokens: int, stop_ids: Iterable[int]) -> Banned:
    """Nothing that ends the reply, until it has ``min_tokens`` tokens."""
    stops = sorted(stop_ids)
    return Banned(lambda num_reply, _: stops if num_reply < min_tokens else ())


def only_at(position: int, token: int) -> Required:
    """One token, and no other, at a position of the reply; the first is 0."""
    return Required(lambda num_reply, _: token if num_reply == position else None)


def thinking_ends(limit: ThinkingLimit) -> Required:
    """Behind the most tokens of thoughts comes what ends them, unless they are over."""
    return Required(partial(_end_of_thoughts, limit), limit.num_tokens + len(limit.end))


def _end_of_thoughts(limit: ThinkingLimit, num_reply: int, reply: Sequence[int]) -> int | None:
    """The only token that may come; the reply so far is whole where that matters."""
    place = num_reply - limit.num_tokens
    if not 0 <= place < len(limit.end) or limit.end[0] in reply[: limit.num_tokens]:
        return None
    is_thinking = tuple(reply[: len(limit.begin)]) == limit.begin
    return limit.end[place] if is_thinking else None


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
        position, tokens = self.never_at
        if self.never:
            yield Banned(lambda *_: self.never)
        if tokens:
            yield Banned(lambda num_reply, _: tokens if num_reply == position else ())
        if self.first is not None:
            yield only_at(0, self.first)
        if self.last is not None:
            yield only_at(max_tokens - 1, self.last)
