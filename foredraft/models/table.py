"""A target made of explicit conditional tables: exact, instant, and without weights.

Tests, property tests and the examples of the docs run on it. Its cache stores the tokens
themselves, so an entry that survives a rejection shows up as a wrong distribution at once.

Shape legend: V vocabulary, N positions whose logits are wanted, T tokens read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from foredraft.cache.blocks import BLOCK
from foredraft.cache.memory import CacheMemory
from foredraft.cache.paged import Cache
from foredraft.models.base import Capabilities, ScoreRow, Scores, check_taps

Conditional = Callable[[tuple[int, ...]], Sequence[float]]


_TOKEN_BYTES = 4
"""Size of an entry, as in an array of tokens."""

_NUM_LAYERS = 2
"""Number of layers that it pretends to have, for drafters that tap them."""


class TokenCache(Cache):
    """A cache whose entry for a token is the token, in the same blocks as other caches.

    Args:
        max_length: the most tokens a slot may hold.
        max_tokens: the most that all may hold together; None: no limit.
        block_size: entries of a block.
    """

    def __init__(
        self, max_length: int = 4096, max_tokens: int | None = None, block_size: int = BLOCK
    ) -> None:
        memory = CacheMemory(None if max_tokens is None else max_tokens * _TOKEN_BYTES)
        super().__init__(max_length, memory, block_size)
        memory.add(self, _TOKEN_BYTES)
        self._entries: dict[int, list[int]] = {}  # by block

    def context(self, slot: int) -> tuple[int, ...]:
        """The tokens that count."""
        return self._read(slot)[: self.length(slot)]

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """Write uncommitted entries after the committed ones; makes room for them."""
        self.reserve(slot, len(tokens))
        self.will_write(slot, len(tokens))
        self._put(slot, self.length(slot), tokens)

    def _read(self, slot: int) -> tuple[int, ...]:
        return tuple(token for block in self.table(slot) for token in self._entries[block])

    def _put(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        table, size = self.table(slot), self.block_size
        for entry, token in enumerate(tokens, start):
            self._entries[table[entry // size]][entry % size] = token

    def _make_room(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._entries[block] = [-1] * self.block_size

    def _copy_block(self, source: int, target: int) -> None:
        self._entries[target] = self._entries[source].copy()

    def _move(self, slot: int, sources: Sequence[int], first: int) -> None:
        held = self._read(slot)
        self._put(slot, first, [held[source] for source in sources])

    def _release(self) -> None:
        super()._release()
        self._entries.clear()


class TableModel:
    """A target whose next-token distribution is a function of the tokens before.

    Args:
        vocab_size: number of tokens.
        conditional: maps the tokens so far to ``vocab_size`` probabilities.
        max_context: most tokens a row may hold.
    """

    def __init__(
        self,
        vocab_size: int,
        conditional: Conditional,
        max_context: int = 4096,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.capabilities = Capabilities(tree_attention=True, taps=range(_NUM_LAYERS))
        self.cache = TokenCache(max_context)
        self._conditional = conditional
        self._logits: dict[tuple[int, ...], Tensor] = {}

    @classmethod
    def from_table(
        cls, vocab_size: int, table: Mapping[tuple[int, ...], Sequence[float]], order: int
    ) -> TableModel:
        """Distributions by the last ``order`` tokens (fewer at the start of the text)."""
        return cls(vocab_size, lambda context: table[context[-order:] if order else ()])

    @classmethod
    def random(
        cls, vocab_size: int, seed: int, order: int = 2, sharpness: float = 1.0
    ) -> TableModel:
        """Random distributions by the last ``order`` tokens; ``sharpness`` 0 is uniform."""

        def conditional(context: tuple[int, ...]) -> list[float]:
            generator = random.Random(f"{seed}/{context[-order:] if order else ()}")
            weights = [generator.expovariate(1.0) ** sharpness for _ in range(vocab_size)]
            return [weight / sum(weights) for weight in weights]

        return cls(vocab_size, conditional)

    def probs(self, context: tuple[int, ...]) -> Sequence[float]:
        """The distribution of the token after ``context``."""
        return self._conditional(context)

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        check_taps(taps, self.capabilities.taps)
        for row in rows:
            self.cache.reserve(row.slot, len(row.pending) + len(row.tree))
        return Scores.of([self._score_row(row, taps) for row in rows])

    def _score_row(self, row: ScoreRow, taps: Sequence[int]) -> Scores:
        before = self.cache.context(row.slot)
        context = (*before, *row.pending)
        self.cache.write(row.slot, (*row.pending, *row.tree.tokens))
        nodes = [(*context, *(row.tree.tokens[i] for i in path)) for path in row.tree.paths]
        read = [context[: end + 1] for end in range(len(before), len(context))] + nodes
        logits_NV = torch.empty((0, self.vocab_size), dtype=torch.float64)
        if row.wants_logits:
            logits_NV = torch.stack([self._logits_after(seen) for seen in (context, *nodes)])
        return Scores.of_row(logits_NV, {layer: _tapped(layer, read) for layer in taps})

    def _logits_after(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._logits:
            probs = torch.tensor(self._conditional(context), dtype=torch.float64)
            self._logits[context] = probs.log()
        return self._logits[context]


def _tapped(layer: int, contexts: Sequence[tuple[int, ...]]) -> Tensor:
    """A stand-in for a layer's output [T, 4]: layer, token, position and the token before."""
    states = [(layer, seen[-1], len(seen) - 1, (-1, *seen)[-2]) for seen in contexts]
    return torch.tensor(states, dtype=torch.float32)
