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

from foredraft.cache.base import KVShape, SlotLengths, check_keep
from foredraft.cache.layers import AddedLayers, StoredLayers
from foredraft.models.base import Capabilities, RowScores, ScoreRow, Scores, check_taps

Conditional = Callable[[tuple[int, ...]], Sequence[float]]


_NUM_LAYERS = 2
"""How many layers it pretends to have, for whoever taps them."""


class TokenCache:
    """A cache whose entry for a token is the token.

    Args:
        max_length: the most tokens a slot may hold.
    """

    def __init__(self, max_length: int = 4096) -> None:
        self._max_length = max_length
        self._lengths = SlotLengths()
        self._added = AddedLayers("cpu")
        self.entries: dict[int, list[int]] = {}

    def allocate(self) -> int:
        slot = self._lengths.open()
        self.entries[slot] = []
        self._added.open(slot)
        return slot

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def context(self, slot: int) -> tuple[int, ...]:
        """The tokens that count."""
        return tuple(self.entries[slot][: self._lengths[slot]])

    def reserve(self, slot: int, num_tokens: int) -> None:
        needed = self._lengths[slot] + num_tokens
        if needed > self._max_length:
            raise ValueError(f"{needed} cache entries wanted; a slot holds {self._max_length}")

    def add_layers(self, shape: KVShape, dtype: torch.dtype) -> StoredLayers:
        return self._added.add(shape, dtype, self._lengths.slots)

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """Put uncommitted entries behind the ones that count."""
        self.entries[slot][self._lengths[slot] :] = tokens

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        start = self._lengths[slot]
        check_keep(num_pending, path, len(self.entries[slot]) - start)
        first = start + num_pending
        kept = [self.entries[slot][first + node] for node in path]
        self.entries[slot][first:] = kept
        self._lengths[slot] = first + len(kept)

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"cannot truncate {self._lengths[slot]} entries to {length}")
        self._lengths[slot] = length
        del self.entries[slot][length:]
        self._added.truncate(slot, length)

    def fork(self, slot: int) -> int:
        length, copy = self._lengths[slot], self.allocate()
        self.entries[copy] = self.entries[slot][:length]
        self._lengths[copy] = length
        self._added.copy(slot, copy, length)
        return copy

    def free(self, slot: int) -> None:
        self._lengths.close(slot)
        del self.entries[slot]
        self._added.close(slot)


class TableModel:
    """A target whose next-token distribution is a function of the tokens before.

    Args:
        vocab_size: number of tokens.
        conditional: maps the tokens so far to ``vocab_size`` probabilities.
        max_context: most tokens a row may hold.
    """

    def __init__(self, vocab_size: int, conditional: Conditional, max_context: int = 4096) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.capabilities = Capabilities(
            tree_attention=True, taps=range(_NUM_LAYERS), cache_layers=True
        )
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
        check_taps(taps, self.capabilities)
        for row in rows:
            self.cache.reserve(row.slot, len(row.pending) + len(row.tree))
        return Scores.of([self._score_row(row, taps) for row in rows])

    def _score_row(self, row: ScoreRow, taps: Sequence[int]) -> RowScores:
        before = self.cache.context(row.slot)
        context = (*before, *row.pending)
        self.cache.write(row.slot, (*row.pending, *row.tree.tokens))
        nodes = [(*context, *(row.tree.tokens[i] for i in path)) for path in row.tree.paths]
        read = [context[: end + 1] for end in range(len(before), len(context))] + nodes
        logits_NV = torch.empty((0, self.vocab_size), dtype=torch.float64)
        if row.wants_logits:
            logits_NV = torch.stack([self._logits_after(seen) for seen in (context, *nodes)])
        return RowScores(logits_NV, {layer: _tapped(layer, read) for layer in taps})

    def _logits_after(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._logits:
            probs = torch.tensor(self._conditional(context), dtype=torch.float64)
            self._logits[context] = probs.log()
        return self._logits[context]


def _tapped(layer: int, contexts: Sequence[tuple[int, ...]]) -> Tensor:
    """A stand-in for a layer's output [T, 4]: layer, token, position and the token before."""
    states = [(layer, seen[-1], len(seen) - 1, (-1, *seen)[-2]) for seen in contexts]
    return torch.tensor(states, dtype=torch.float32)
