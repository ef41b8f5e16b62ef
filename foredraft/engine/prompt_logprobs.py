"""Log probabilities of a prompt, taken as it is read.

A target returns logits after a whole chunk of a prompt, and after each node of a draft. So a
prompt whose log probabilities are wanted is read like a draft that is always right: the first token
of a chunk as text, those behind it as a chain of nodes, all of which stay in the cache. Chunks are
short, because the logits after all of their tokens are in memory at once.

Shape legend: N tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from foredraft.core.logprobs import TokenLogprobs

_AT_ONCE = 64
"""Tokens of a chunk: 13 MB of logits where the vocabulary has 49,152 tokens."""


class PromptLogprobs:
    """The log probabilities of one prompt, as far as it has been read.

    Args:
        count: number of likeliest tokens at each position.
        num_prompt: tokens of the prompt.

    Attributes:
        tokens: an entry for each token of the prompt in its order; None for the first, which has no
            text before it.
    """

    def __init__(self, count: int, num_prompt: int) -> None:
        self._count, self._num_prompt = count, num_prompt
        self.tokens: list[TokenLogprobs | None] = [None]

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) == self._num_prompt

    def num_usable(self, num_cached: int) -> int:
        """Number of cached tokens not to read again: their log probabilities are known."""
        return num_cached if self.is_complete else min(num_cached, len(self.tokens) - 1)

    def num_readable(self, num_cached: int, num_pending: int) -> int:
        """Most pending tokens of one step; the prompt's last token is read by itself."""
        if self.is_complete:
            return num_pending
        return min(_AT_ONCE, self._num_prompt - 1 - num_cached)

    def take(self, logits_NV: Iterable[Tensor], start: int, tokens: Sequence[int]) -> None:
        """Add those of a chunk that has been read.

        Args:
            logits_NV: after each of its tokens.
            start: the position of its first token.
            tokens: the whole text.

        Raises:
            NonFiniteScoresError: logits are NaN or infinite.
        """
        for position, logits_V in enumerate(logits_NV, start + 1):
            if position == len(self.tokens) and not self.is_complete:
                self.tokens.append(TokenLogprobs.of(logits_V, tokens[position], self._count))
