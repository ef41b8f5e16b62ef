"""Tokens that may not come: those not allowed, the ends of bad words, ends that come too soon.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


class Ban(Protocol):
    """Names tokens that cannot come next."""

    def apply(self, logits_V: Array, reply: Sequence[int]) -> None:
        """Put the logits of banned tokens to -inf.

        Args:
            reply: the generated tokens before the position, drafted ones included.
        """
        ...

    def permits(self, token: int, reply: Sequence[int]) -> bool:
        """Whether a token is not banned there."""
        ...


class AllowedTokens:
    """No other tokens than these.

    Args:
        tokens: below ``vocab_size``.
    """

    def __init__(self, tokens: Iterable[int], vocab_size: int) -> None:
        self._banned_V = np.ones(vocab_size, dtype=bool)
        self._banned_V[list(tokens)] = False

    def apply(self, logits_V: Array, reply: Sequence[int]) -> None:
        logits_V[self._banned_V] = -np.inf

    def permits(self, token: int, reply: Sequence[int]) -> bool:
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
        self.longest = 1
        for *beginning, last in sequences:
            self.longest = max(self.longest, len(beginning) + 1)
            if beginning:
                self._after.setdefault(beginning[-1], []).append((tuple(beginning), last))
            else:
                self._single.add(last)

    def apply(self, logits_V: Array, reply: Sequence[int]) -> None:
        logits_V[list(self._banned(reply))] = -np.inf

    def permits(self, token: int, reply: Sequence[int]) -> bool:
        return token not in self._banned(reply)

    def _banned(self, reply: Sequence[int]) -> Collection[int]:
        candidates = self._after.get(reply[-1], ()) if reply else ()
        return self._single.union(
            last for beginning, last in candidates if tuple(reply[-len(beginning) :]) == beginning
        )


class NoEndYet:
    """Nothing that ends the reply, until it has ``min_tokens`` tokens."""

    def __init__(self, min_tokens: int, stop_ids: Iterable[int]) -> None:
        self._min_tokens, self._stop_ids = min_tokens, sorted(stop_ids)

    def apply(self, logits_V: Array, reply: Sequence[int]) -> None:
        if len(reply) < self._min_tokens:
            logits_V[self._stop_ids] = -np.inf

    def permits(self, token: int, reply: Sequence[int]) -> bool:
        return len(reply) >= self._min_tokens or token not in self._stop_ids
