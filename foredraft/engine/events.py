"""What the engine tells of a request, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foredraft.core.logprobs import TokenLogprobs
from foredraft.engine.detokenize import Piece
from foredraft.engine.row import GenerationResult


@dataclass(frozen=True)
class Event:
    """What a step brought one request, or one of the replies that a request asked for.

    Attributes:
        request_id: counts the replies of an engine.
        token_ids: newly committed ids.
        num_accepted: how many of them were drafted.
        pieces: text that became certain, marked as drafted or the target's own.
        num_prompt_read: tokens of the prompt that have been read by now.
        logprobs: of each of these ids, where the request asks for them; else empty.
        result: the final result, on the reply's last event.
        parent_id: the id of the first of the replies to one prompt; its own where there is one.
        index: which of these replies it is.
        num_drafted: draft tokens that the step sent to verification for it.
        prompt_logprobs: of the prompt, where the request asks for them, with the reply's first
            tokens; else None.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_accepted: int
    pieces: tuple[Piece, ...]
    num_prompt_read: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    result: GenerationResult | None = None
    parent_id: int = -1
    index: int = 0
    num_drafted: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


Reader = Callable[[Event], None]
"""Takes one request's events, on whichever thread steps. It must be quick and must not raise."""
