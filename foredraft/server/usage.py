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
    """vLLM's ``metrics`` of one reply that is over; None for several, or where not asked for.

    As there (vllm-project/vllm#48915), only steps with a draft count: `num_spec_steps` is the sum
    of the histogram, whose place j counts the steps that accepted j draft tokens.
    """
    reply = replies[0]
    if detail == "none" or len(replies) != 1 or reply.result is None:
        return None
    steps = [each for each in zip(reply.accepted, reply.drafted, strict=True) if each[1]]
    accepted, drafted = [each[0] for each in steps], [each[1] for each in steps]
    most = max(drafted, default=0)
    figures: dict[str, Any] = {
        "mean_acceptance_length": 1.0 + (sum(accepted) / len(steps) if steps else 0.0),
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if steps else 0.0,
        "acceptance_histogram": [accepted.count(number) for number in range(most + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": most,
    }
    if detail == "detailed":
        figures |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return {"speculative_decoding": figures}
