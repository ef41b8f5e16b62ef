"""Laws over some of a vocabulary's tokens: those that a head has output rows for.

The choices equal those from logits over the whole vocabulary with -inf for all other tokens. They
take a fraction of the time, and one call serves several positions of a text.

Shape legend: N rows of logits, R named tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.core import draws
from foredraft.core.draws import Array, Scored
from foredraft.core.noise import gumbel_top_rows
from foredraft.core.sampling import Law

_GROUP = 256
"""Tokens whose coarse bytes are one run of philox blocks; see `foredraft.core.noise`."""


class NamedTokens:
    """The token of each output row.

    Args:
        ids_R: ascending.
        vocab_size: V.

    Attributes:
        starts: the first row of each group of tokens, and at the end R.
        lows_R: each row's token within its group, as one byte to save memory traffic.
    """

    def __init__(self, ids_R: Array, vocab_size: int) -> None:
        self.ids_R = np.ascontiguousarray(ids_R, dtype=np.int64)
        self.vocab_size = vocab_size
        groups = np.arange(0, vocab_size + _GROUP, _GROUP)
        self.starts = np.searchsorted(self.ids_R, groups).astype(np.int64)
        self.lows_R = (self.ids_R % _GROUP).astype(np.uint8)

    @property
    def are_all(self) -> bool:
        """Whether every token has a row."""
        return len(self.ids_R) == self.vocab_size

    def row(self, token: int) -> int | None:
        """The output row of a token, or None."""
        row = int(np.searchsorted(self.ids_R, token))
        return row if row < len(self.ids_R) and self.ids_R[row] == token else None

    def spread(self, logits_R: Array) -> Array:
        """Logits [V]: tokens without a row cannot occur."""
        at_V = np.full(self.vocab_size, -math.inf, dtype=logits_R.dtype)
        at_V[self.ids_R] = logits_R
        return at_V


@dataclass(frozen=True)
class NamedLaws:
    """Distributions over named tokens at several positions.

    Attributes:
        tokens: the tokens of the columns.
        logits_NR: contiguous float32.
        scale: 1 / temperature.
        others: for each position further tokens that may follow, with their logits.
    """

    tokens: NamedTokens
    logits_NR: Array
    scale: float
    others: Sequence[Sequence[tuple[int, float]]]

    def law(self, index: int) -> Law:
        """The distribution at one position over the whole vocabulary."""
        logits_V = self.tokens.spread(self.logits_NR[index])
        for token, logit in self.others[index]:
            logits_V[token] = logit
        return Law(torch.from_numpy(logits_V), self.scale, int(logits_V.argmax()))

    def top(self, count: int, seed: int, positions: Sequence[int]) -> list[Scored]:
        """`foredraft.core.noise.gumbel_top` of each row of logits, at its position.

        Raises:
            ValueError: see `foredraft.core.noise.gumbel_top`.
        """
        keys = [(seed, position, self.scale) for position in positions]
        tokens = self.tokens
        found = None
        if not tokens.are_all:
            found = draws.top_named(
                self.logits_NR, tokens.lows_R, tokens.starts, self.others, count, keys
            )
        if found is None:
            return self._dense_top(count, seed, positions)
        scored, num_done = found
        if num_done < len(positions):
            raise ValueError(f"the largest of {len(tokens.ids_R)} logits of a draft is not finite")
        return scored

    def _dense_top(self, count: int, seed: int, positions: Sequence[int]) -> list[Scored]:
        logits_NV = self.logits_NR
        if not self.tokens.are_all or any(self.others):
            logits_NV = np.stack([self.law(n).logits_V.numpy() for n in range(len(positions))])
        num_places = len(positions)
        return gumbel_top_rows(
            logits_NV, count, [seed] * num_places, positions, [self.scale] * num_places
        )
