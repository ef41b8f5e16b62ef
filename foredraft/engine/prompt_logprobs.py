"""Log probabilities of a prompt, taken as it is read.

A target says what follows a whole chunk of a prompt, and what follows each node of a draft. So a
prompt whose every token is asked about is read like a draft that is always right: the first token
of a chunk as text, those behind it as a chain of nodes, all of which stay in the cache. Chunks are
short, because the logits of all their places are there at once.

Shape legend: N tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from foredraft.core.logprobs import TokenLogprobs

_AT_ONCE = 64
"""Tokens of a chunk: 13 MB of logits where the vocabulary has 49,152 tokens."""


class PromptLogprobs:
    """What has been found of one prompt.

    Args:
        count: likeliest tokens at each place.
        num_prompt: tokens of the prompt.

    Attributes:
        found: by token of the prompt. Nothing foretells the first.
    """

    def __init__(self, count: int, num_prompt: int) -> None:
        self._count, self._num_prompt = count, num_prompt
        self.found: list[TokenLogprobs | None] = [None]

    @property
    def is_complete(self) -> bool:
        return len(self.found) == self._num_prompt

    def num_usable(self, num_cached: int) -> int:
        """How many entries of a cache can be used: places that are not read say nothing."""
        return num_cached if self.is_complete else min(num_cached, len(self.found) - 1)

    def num_readable(self, num_cached: int, num_pending: int) -> int:
        """How many pending tokens one step may read; the prompt's last one by itself."""
        if self.is_complete:
            return num_pending
        return min(_AT_ONCE, self._num_prompt - 1 - num_cached)

    def take(self, logits_NV: Iterable[Tensor], start: int, tokens: Sequence[int]) -> None:
        """A chunk has been read.

        Args:
            logits_NV: after each of its tokens.
            start: the position of its first token.
            tokens: the whole text.
        """
        for place, logits_V in enumerate(logits_NV, start + 1):
            if place == len(self.found) and not self.is_complete:
                self.found.append(TokenLogprobs.of(logits_V, tokens[place], self._count))
