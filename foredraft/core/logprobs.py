"""Log probabilities that a reply carries along.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foredraft.core.sampling import check_finite, largest


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of one token and of the likeliest tokens at its position.

    They are of the target's own distribution, the log softmax of its logits, before temperature,
    penalties, filters, bans or a grammar (vLLM's default, ``raw_logprobs``); the same with and
    without speculation.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, 0 or less.
        top: the requested number of likeliest tokens with their log probabilities, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, logits_V: Tensor, token: int, count: int) -> TokenLogprobs:
        """By the target's logits at the position of ``token``, in float64.

        Args:
            count: how many of the likeliest tokens ``top`` names.

        Raises:
            NonFiniteScoresError: the largest logit is NaN or infinite.
        """
        values_V = logits_V.detach().cpu().numpy().astype(np.float64)
        best = float(values_V.max())
        check_finite(best, values_V.size)
        log_total = best + math.log(float(np.exp(values_V - best).sum()))
        top = tuple((i, float(values_V[i]) - log_total) for i in largest(values_V, count))
        return cls(token, float(values_V[token]) - log_total, top)
