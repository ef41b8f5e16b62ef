"""A target made of explicit conditional tables: exact, instant, and without weights.

Tests, property tests and the examples of the docs run on it. Its cache stores the tokens
themselves, so an entry that survives a rejection shows up as a wrong distribution at once.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from foredraft.cache.base import SlotLengths
from foredraft.models.base import Capabilities, RowScores, ScoreRow

Conditional = Callable[[tuple[int, ...]], Sequence[float]]


class TokenCache:
    """A cache whose entry for a token is the token."""

    def __init__(self) -> None:
        self._lengths = SlotLengths()
        self.entries: dict[int, list[int]] = {}

    def allocate(self) -> int:
        slot = self._lengths.open()
        self.entries[slot] = []
        return slot

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def context(self, slot: int) -> tuple[int, ...]:
        """The tokens that count."""
        return tuple(self.entries[slot][: self._lengths[slot]])

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """Put uncommitted entries behind the ones that count."""
        self.entries[slot][self._lengths[slot] :] = tokens

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        first = self._lengths[slot] + num_pending
        kept = [self.entries[slot][first + node] for node in path]
        self.entries[slot][first:] = kept
        self._lengths[slot] = first + len(kept)

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"cannot truncate {self._lengths[slot]} entries to {length}")
        self._lengths[slot] = length
        del self.entries[slot][length:]

    def fork(self, slot: int) -> int:
        length, copy = self._lengths[slot], self.allocate()
        self.entries[copy] = list(self.entries[slot])
        self._lengths[copy] = length
        return copy

    def free(self, slot: int) -> None:
        self._lengths.close(slot)
        del self.entries[slot]


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
        self.capabilities = Capabilities(tree_attention=True)
        self.cache = TokenCache()
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

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> list[RowScores]:
        return [self._score_row(row) for row in rows]

    def _score_row(self, row: ScoreRow) -> RowScores:
        context = (*self.cache.context(row.slot), *row.pending)
        self.cache.write(row.slot, (*row.pending, *row.tree.tokens))
        contexts = [context]
        contexts += [(*context, *(row.tree.tokens[i] for i in path)) for path in row.tree.paths]
        return RowScores(torch.stack([self._logits_after(context) for context in contexts]))

    def _logits_after(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._logits:
            probs = torch.tensor(self._conditional(context), dtype=torch.float64)
            self._logits[context] = probs.log()
        return self._logits[context]
