"""Run the engine on table models, and make sure that nothing went wrong in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.drafters.base import Drafter
from foredraft.engine.request import GenerationResult
from foredraft.models.base import Target
from tests.engine.helpers import engine_of
from tests.exactness.worlds import Tokens

PROMPT: Tokens = (0,)


@dataclass(frozen=True)
class Sample:
    """Texts of many requests, and how many rows were verified to make them."""

    texts: Counter[Tokens]
    num_verified: int


def generate(
    target: Target,
    drafter: Drafter,
    num_draft_tokens: int,
    requests: Iterable[tuple[Tokens, SamplingParams]],
    max_batch_size: int = 32,
) -> list[GenerationResult]:
    """The results of ``requests``, in their order.

    The engine outlives the faults of a drafter and of a target by design; a test must not.
    """
    budget = FixedBudget(num_draft_tokens)
    engine = engine_of(target, drafter, budget, max_batch_size=max_batch_size)
    for prompt, params in requests:
        engine.submit(prompt, params)
    results = [event.result for event in engine.run() if event.result is not None]
    assert not engine._policy.num_faults, "the drafter failed"
    for result in results:
        assert result.finish_reason == "length", result.error
    return sorted(results, key=lambda result: result.request_id)


def texts(results: Sequence[GenerationResult]) -> list[Tokens]:
    return [result.token_ids for result in results]


def sample(
    target: Target,
    drafter: Drafter,
    num_draft_tokens: int,
    params: SamplingParams,
    seeds: Iterable[int],
) -> Sample:
    """One request a seed, all for the same prompt."""
    requests = ((PROMPT, replace(params, seed=seed)) for seed in seeds)
    results = generate(target, drafter, num_draft_tokens, requests)
    return Sample(Counter(texts(results)), sum(result.stats.steps for result in results))
