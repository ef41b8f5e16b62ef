"""One request's tokens, and the accounting of what speculation did for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from foredraft.core.params import SamplingParams

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass
class SpeculationStats:
    """Counts of one request. ``drafted == accepted + rejected + discarded`` always holds.

    Attributes:
        steps: target forwards that committed tokens.
        drafted: draft tokens sent to verification.
        accepted: draft tokens committed.
        rejected: draft tokens that verification did not accept.
        discarded: draft tokens accepted by verification but past the stop.
        committed: all tokens committed, drafted or the target's own.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    discarded: int = 0
    committed: int = 0

    @property
    def committed_per_step(self) -> float:
        """Tokens committed a step, 1.0 for plain decoding; 0.0 before the first step."""
        return self.committed / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were committed; 0.0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def record(self, drafted: int, verified: int, accepted: int, committed: int) -> None:
        """Add one step: ``verified`` nodes passed verification, ``accepted`` of them were kept."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += drafted - verified
        self.discarded += verified - accepted
        self.committed += committed


@dataclass
class Request:
    """The committed tokens of one request and how many of them the KV cache holds.

    Between steps ``num_cached + len(pending) == len(tokens)`` and ``pending`` is never empty.

    Attributes:
        slot: the request's row in the target's cache.
        tokens: prompt and committed tokens.
        num_prompt: length of the prompt.
        seed: the resolved seed.
    """

    request_id: int
    slot: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def pending(self) -> list[int]:
        """Committed tokens that the KV cache does not hold yet."""
        return self.tokens[self.num_cached :]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_remaining(self) -> int:
        """Tokens that max_tokens still allows."""
        return self.params.max_tokens - (len(self.tokens) - self.num_prompt)

    def check(self) -> None:
        """Assert the invariant between steps."""
        assert 0 <= self.num_cached < len(self.tokens), (self.num_cached, len(self.tokens))
        assert self.stats.drafted == (
            self.stats.accepted + self.stats.rejected + self.stats.discarded
        )
        assert self.stats.committed == len(self.tokens) - self.num_prompt
