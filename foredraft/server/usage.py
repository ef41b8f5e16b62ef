"""Usage of a reply: its token counts, and the figures of speculation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.generation import GenerationRequest, ReplyState

_MAX_MASKS = 256
"""Most distinct tokens of a prediction whose bit masks are cached."""


def usage_of(
    replies: Sequence[ReplyState],
    request: GenerationRequest,
    tokenizer: Tokenizer,
    repeated: Sequence[Repeated] = (),
) -> dict[str, Any]:
    """OpenAI's ``usage`` of replies that are over, or under way.

    Args:
        repeated: what each of them repeats of a prediction; empty: there is none.
    """
    prompts = replies[:: request.params.n]  # a prompt counts once
    num_prompt = sum(reply.num_prompt_tokens for reply in prompts)
    num_reply = sum(reply.num_tokens for reply in replies)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_reply,
        "total_tokens": num_prompt + num_reply,
        "prompt_tokens_details": {"cached_tokens": num_cached(prompts)},
    }
    details: dict[str, int] = {}
    if request.thinks or repeated:
        counts = (num_reasoning(reply, request, tokenizer) for reply in replies)
        details["reasoning_tokens"] = sum(counts)
    if repeated:  # independent of the drafter
        accepted = sum(each.count for each in repeated)
        rejected = sum(each.num_predicted for each in repeated) - accepted
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = rejected
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


class ExpectedText:
    """The text that a reply is expected to repeat.

    Args:
        tokens: its ids.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.num_tokens = len(tokens)
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(tokens):
            self._places.setdefault(token, []).append(place)
        self.mask = lru_cache(_MAX_MASKS)(self._mask)

    def _mask(self, token: int) -> int:
        """The positions of a token, as the bits of a number."""
        bits = bytearray(self.num_tokens // 8 + 1)
        for place in self._places.get(token, ()):
            bits[place >> 3] |= 1 << (place & 7)
        return int.from_bytes(bits, "little")


class Repeated:
    """Counts the tokens of a prediction that a reply repeats in their order, as the reply comes.

    It is the length of their longest common subsequence. A token of the reply costs a few
    operations on a number of as many bits as the prediction has tokens (H. Hyyrö, Bit-parallel
    LCS-length computation revisited, 2004).
    """

    def __init__(self, prediction: ExpectedText) -> None:
        self._prediction = prediction
        self._all = self._left = (1 << prediction.num_tokens) - 1  # a bit for each token

    @property
    def num_predicted(self) -> int:
        return self._prediction.num_tokens

    @property
    def count(self) -> int:
        return self.num_predicted - self._left.bit_count()

    def add(self, tokens: Sequence[int]) -> None:
        """The reply's next tokens."""
        for token in tokens:
            left, matched = self._left, self._left & self._prediction.mask(token)
            self._left = ((left + matched) | (left - matched)) & self._all


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
