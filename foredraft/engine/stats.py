"""Counts of an engine's work so far and of its live requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.core.record import FinishReason


@dataclass
class EngineStats:
    """Counts since the engine's start; `Engine.stats` hands out copies.

    Attributes:
        running: requests in the batch.
        waiting: requests that wait for room in it.
        finished: finished requests, by finish reason.
        steps: forwards of the target.
        prompt_tokens: prefilled tokens: of prompts (without cached ones), and of replies after a
            preemption.
        committed: tokens committed, drafted or the target's own.
        drafted: draft tokens sent to verification.
        accepted: draft tokens committed.
        preemptions: how often a request was preempted.
        cache_tokens: entries that requests use, in tokens.
        cache_free_tokens: entries that requests may still use; cached blocks count as free.
        prefix_tokens: tokens of all texts that began.
        prefix_cached_tokens: tokens of them that were already cached.
    """

    running: int = 0
    waiting: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    steps: int = 0
    prompt_tokens: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    cache_tokens: int = 0
    cache_free_tokens: int = 0
    prefix_tokens: int = 0
    prefix_cached_tokens: int = 0
