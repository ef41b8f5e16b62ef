"""What a reply took: usage, and what speculation did for it."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from foredraft.server.generation import Reply

_MAX_COMPARED = 4096


def usage_of(replies: Sequence[Reply], n: int, prediction: Sequence[int] = ()) -> dict[str, Any]:
    """OpenAI's ``usage`` of replies that are over, or under way.

    Args:
        n: replies to a prompt; a prompt counts once.
        prediction: ids of the text that was expected.
    """
    prompts = replies[::n]
    num_prompt = sum(reply.num_prompt_tokens for reply in prompts)
    num_reply = sum(reply.num_tokens for reply in replies)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_reply,
        "total_tokens": num_prompt + num_reply,
        "prompt_tokens_details": {"cached_tokens": num_cached(prompts)},
    }
    if prediction:
        usage["completion_tokens_details"] = _prediction_details(replies, prediction)
    return usage


def num_cached(replies: Sequence[Reply]) -> int:
    """Prompt tokens that were not read anew; known at the end."""
    return sum(reply.result.num_cached_tokens for reply in replies if reply.result is not None)


def _prediction_details(replies: Sequence[Reply], prediction: Sequence[int]) -> dict[str, int]:
    """How much of a prediction came true: what OpenAI counts, whatever drafted it."""
    accepted = 0
    for reply in replies:
        if reply.result is not None:
            accepted += _num_common(prediction[:_MAX_COMPARED], reply.result.token_ids)
    return {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": max(0, len(prediction) * len(replies) - accepted),
    }


def _num_common(expected: Sequence[int], written: Sequence[int]) -> int:
    matcher = SequenceMatcher(None, expected, written[:_MAX_COMPARED], autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())


def speculation_of(replies: Sequence[Reply], detail: str) -> dict[str, Any] | None:
    """vLLM's ``metrics`` of one reply that is over; None for several, or where not asked for."""
    result = replies[0].result
    if detail == "none" or len(replies) != 1 or result is None:
        return None
    accepted, stats = replies[0].accepted, result.stats
    histogram = [0] * (max(accepted, default=0) + 1)
    for number in accepted:
        histogram[number] += 1
    figures: dict[str, Any] = {
        "mean_acceptance_length": stats.committed_per_step,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(histogram) - 1,
    }
    if detail == "detailed":
        figures["per_step_accepted"] = list(accepted)
    return {"speculative_decoding": figures}
