"""Biases of tokens: logit_bias, then the penalties for tokens that the text holds already.

As in transformers and vLLM the repetition penalty counts prompt and reply; presence and frequency
count the reply alone, as OpenAI's do.

Shape legend: V vocabulary, M some tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foredraft.core.params import SamplingParams

Array: TypeAlias = npt.NDArray[Any]


class Bias:
    """A number to add to the logits of some tokens."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens_M = np.array(list(biases), dtype=np.int64)
        self._biases_M = np.array(list(biases.values()))

    def apply(self, logits_V: Array) -> None:
        logits_V[self._tokens_M] += self._biases_M.astype(logits_V.dtype)


class Penalties:
    """Counts of what the text holds, kept as the text grows.

    Args:
        params: with the penalties.
        num_prompt: tokens of the prompt.
    """

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self._params, self._num_prompt = params, num_prompt
        self._counts = _Counts()

    @staticmethod
    def are_in(params: SamplingParams) -> bool:
        """Whether there is something to do."""
        given = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        return given != (1.0, 0.0, 0.0)

    def apply(self, logits_V: Array, text: Sequence[int], drafted: Sequence[int]) -> None:
        """Penalise what the text and the guesses behind it hold."""
        self._catch_up(text)
        tokens_M, counts_M = self._counts.after(drafted)
        logits_V[tokens_M] = self._penalised(logits_V[tokens_M], counts_M)

    def _catch_up(self, text: Sequence[int]) -> None:
        counts = self._counts
        if counts.num_read > len(text):  # the text of another request, or one taken back
            counts = self._counts = _Counts()
        if self._params.repetition_penalty != 1.0:
            for token in text[counts.num_read : self._num_prompt]:
                counts.add(token, 0)
        for token in text[max(counts.num_read, self._num_prompt) :]:
            counts.add(token, 1)
        counts.num_read = len(text)

    def _penalised(self, logits_M: Array, counts_M: Array) -> Array:
        """Each number comes from one token alone, so it has the same bits in any company."""
        params = self._params
        factor = params.repetition_penalty
        if factor != 1.0:
            logits_M = np.where(logits_M > 0.0, logits_M / factor, logits_M * factor)
        logits_M = logits_M - counts_M.astype(logits_M.dtype) * params.frequency_penalty
        return logits_M - (counts_M > 0).astype(logits_M.dtype) * params.presence_penalty


class _Counts:
    """How often tokens came; those that are named with 0 are known and were not generated.

    Attributes:
        num_read: tokens of the text that are in it.
    """

    def __init__(self) -> None:
        self.num_read = 0
        self._index: dict[int, int] = {}
        self._tokens_M = np.empty(64, dtype=np.int64)
        self._counts_M = np.empty(64, dtype=np.int64)

    def add(self, token: int, count: int) -> None:
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = len(self._index)
            if index == len(self._tokens_M):
                self._tokens_M = np.resize(self._tokens_M, 2 * index)
                self._counts_M = np.resize(self._counts_M, 2 * index)
            self._tokens_M[index], self._counts_M[index] = token, 0
        self._counts_M[index] += count

    def after(self, drafted: Sequence[int]) -> tuple[Array, Array]:
        """Distinct tokens and their counts once ``drafted`` has come, too."""
        size = len(self._index)
        tokens_M, counts_M = self._tokens_M[:size], self._counts_M[:size]
        if not drafted:
            return tokens_M, counts_M
        counts_M, new = counts_M.copy(), dict[int, int]()
        for token in drafted:
            index = self._index.get(token)
            if index is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts_M[index] += 1
        return (
            np.append(tokens_M, np.array(list(new), dtype=np.int64)),
            np.append(counts_M, np.array(list(new.values()), dtype=np.int64)),
        )
