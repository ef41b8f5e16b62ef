"""Log probabilities that a reply carries along."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """What the target thought of one token, and of the ones it liked best in its place.

    They are of the target's own distribution, the log softmax of its logits, before temperature,
    penalties, filters, bans or a grammar (vLLM's default, ``raw_logprobs``); the same with and
    without speculation.

    Attributes:
        token: its id.
        logprob: its natural logarithm of probability, 0 or less.
        top: the likeliest tokens there with theirs, likeliest first, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
