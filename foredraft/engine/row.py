"""A request inside the engine: its tokens, its text, and what it came with."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.cache.base import Cache
from foredraft.core.request import FinishReason, Request, SpeculationStats
from foredraft.engine.detokenize import TextAssembler


@dataclass(eq=False)
class Session:
    """A conversation whose cache entries outlive a request.

    The next request whose prompt starts with the same tokens reads only what is new.

    Attributes:
        slot: the target's cache slot, or None before the first request.
        tokens: the tokens whose entries the slot holds.
        busy: whether a request is using it.
    """

    slot: int | None = None
    tokens: list[int] = field(default_factory=list)
    busy: bool = False


@dataclass(eq=False)
class Row:
    """What the scheduler schedules.

    Attributes:
        num_sent: generated tokens that events have already carried.
        num_accepted_sent: how many of those were drafted.
    """

    request: Request
    text: TextAssembler
    stop_ids: frozenset[int]
    session: Session | None = None
    error: str | None = None
    num_sent: int = 0
    num_accepted_sent: int = 0

    @property
    def request_id(self) -> int:
        return self.request.request_id

    def take(self) -> tuple[tuple[int, ...], int]:
        """Generated ids that were not taken before, and how many of them were drafted."""
        ids = tuple(self.request.tokens[self.request.num_prompt + self.num_sent :])
        num_accepted = self.request.stats.accepted - self.num_accepted_sent
        self.num_sent += len(ids)
        self.num_accepted_sent += num_accepted
        return ids, num_accepted

    def check(self, cache: Cache) -> None:
        """Refuse to go on from a step that was interrupted between its commit and its cache.

        Raises:
            RuntimeError: sequence and cache disagree; the text would silently be another.
        """
        held, counted = cache.length(self.request.slot), self.request.num_cached
        if held != counted:
            raise RuntimeError(
                f"the cache holds {held} tokens of request {self.request_id} and its sequence "
                f"counts {counted}: an earlier step was interrupted"
            )


@dataclass(frozen=True)
class GenerationResult:
    """What a request produced.

    Attributes:
        text: the generated text, without the stop string that ended it.
        token_ids: the generated ids; the last one is the one that completed the stop, if any.
        finish_reason: "stop" (end of text, stop id or stop string), "length" (max_tokens or the
            context is full), "cancelled", or "error" (see ``error``; what was committed is kept).
        stats: what speculation did.
        seed: the seed in use, also when none was asked for.
        num_prompt_tokens: length of the prompt.
        error: what went wrong, for finish reason "error".
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: SpeculationStats
    seed: int
    num_prompt_tokens: int
    error: str | None = None
