"""Why a reply ended, in the words of the dialects."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.engine.row import GenerationResult
from foredraft.models.text.tokenizer import Tokenizer


def finish_reason(result: GenerationResult, num_calls: int = 0) -> str:
    """OpenAI's ``finish_reason`` of a reply that came to its end."""
    if num_calls and result.finish_reason == "stop":
        return "tool_calls"
    return result.finish_reason


def stop_string(result: GenerationResult, stops: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """Which stop string ended the reply; None: none did."""
    if result.finish_reason != "stop" or not stops:
        return None
    behind = tokenizer.decode(result.token_ids)[len(result.text) :]
    found = [stop for stop in stops if behind.startswith(stop)]
    return max(found, key=len, default=None)
