"""Usage of a reply: its token counts, and the figures of speculation."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.generation import GenerationRequest, ReplyState


def usage_of(
    replies: Sequence[ReplyState], request: GenerationRequest, tokenizer: Tokenizer
) -> dict[str, Any]:
    """OpenAI's ``usage`` of replies that are over, or under way.

    Tokens of a prediction count as accepted where they are in a reply that is over, whatever their
    order and their drafter.
    """
    prompts = replies[:: request.params.n]  # a prompt counts once
    num_prompt = sum(reply.num_prompt_tokens for reply in prompts)
    num_reply = 0 if request.scores_only else sum(reply.num_tokens for reply in replies)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_reply,
        "total_tokens": num_prompt + num_reply,
        "prompt_tokens_details": {"cached_tokens": num_cached(prompts)},
    }
    details: dict[str, int] = {}
    if request.thinks or request.prediction:
        counts = (num_reasoning(reply, request, tokenizer) for reply in replies)
        details["reasoning_tokens"] = sum(counts)
    if request.prediction:
        written = [Counter(each.result.token_ids) for each in replies if each.result is not None]
        accepted = sum((request.prediction & reply).total() for reply in written)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = request.prediction.total() * len(written) - accepted
    return usage | ({"completion_tokens_details": details} if details else {})


def num_reasoning(reply: ReplyState, request: GenerationRequest, tokenizer: Tokenizer) -> int:
    """Tokens of a reply that is over up to the end of its thoughts."""
    if not request.thinks:
        return 0

    def text(size: int) -> str:
        return tokenizer.decode([*tokens[:size]], skip_special_tokens=False)

    tokens = reply.result.token_ids if reply.result is not None else ()
    whole, end = text(len(tokens)), request.form.end_think
    if not (request.in_thoughts or whole.lstrip().startswith(request.form.think)):
        return 0
    if end not in whole:
        return len(tokens)
    return bisect_left(range(len(tokens) + 1), True, key=lambda size: end in text(size))


def num_cached(replies: Sequence[ReplyState]) -> int:
    """Prompt tokens that were cached; known at the end."""
    return sum(reply.result.num_cached_tokens for reply in replies if reply.result is not None)


def speculation_of(replies: Sequence[ReplyState], detail: str) -> dict[str, Any] | None:
    """vLLM's ``metrics`` of one reply that is over; None for several, or where not asked for.

    As there (vllm-project/vllm#48915), only steps with a draft count: `num_spec_steps` is the sum
    of the histogram, whose entry j counts the steps that accepted j draft tokens.
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
        "drafters": reply.result.stats.drafters,
        "plain_reason": reply.result.stats.plain_reason,
    }
    if detail == "detailed":
        figures |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return {"speculative_decoding": figures}
