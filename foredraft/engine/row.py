"""A request inside the engine: its sequence, its text, and what it came with."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.core.sequence import FinishReason, Sequence, SpeculationStats
from foredraft.engine.detokenize import TextAssembler


@dataclass
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


@dataclass
class Row:
    """What the scheduler schedules."""

    sequence: Sequence
    text: TextAssembler
    stop_ids: frozenset[int]
    session: Session | None = None
    error: str | None = None

    @property
    def request_id(self) -> int:
        return self.sequence.request_id


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
