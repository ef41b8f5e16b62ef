"""Log probabilities: the target's own, for drafted tokens and for prompts, with any drafter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from foredraft.core.params import SamplingParams
from foredraft.engine.request import GenerationResult
from foredraft.models.table import TableModel
from tests.engine.helpers import (
    FaultyTarget,
    counting_drafter,
    counting_model,
    finish,
    generate,
    new_engine,
)

PROMPT = [0, 1, 2, 3, 9, 4]


def expected(target: TableModel, text: list[int], place: int) -> float:
    return math.log(target.probs(tuple(text[:place]))[text[place]])


def check(target: TableModel, result: GenerationResult, prompt: list[int], count: int) -> None:
    text = [*prompt, *result.token_ids]
    assert result.logprobs is not None
    assert [p.token for p in result.logprobs] == list(result.token_ids)
    for place, found in enumerate(result.logprobs, len(prompt)):
        assert found.logprob == pytest.approx(expected(target, text, place))
        assert len(found.top) == count
        probs = target.probs(tuple(text[:place]))
        ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))[:count]
        assert [token for token, _ in found.top] == ranked


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_tokens_have_the_targets_numbers(num_draft_tokens: int, temperature: float) -> None:
    """Of the model itself: penalties and filters change what is drawn, and not these."""
    target = counting_model()
    engine = new_engine(target, counting_drafter(3), num_draft_tokens=num_draft_tokens)
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=12, logprobs=3, presence_penalty=0.1, top_k=5
    )
    (result,) = generate(engine, [PROMPT], params)
    check(target, result, PROMPT, 3)
    assert result.stats.accepted > 0 or not num_draft_tokens


def test_what_a_stop_cuts_off_has_none() -> None:
    engine = new_engine(counting_model(), counting_drafter(), num_draft_tokens=6)
    params = SamplingParams(logprobs=0, stop_token_ids=[7], max_tokens=20)
    (result,) = generate(engine, [PROMPT], params)
    assert [p.token for p in result.logprobs or ()] == [5, 6, 7] == list(result.token_ids)


@pytest.mark.parametrize("length", [1, 2, 6, 64, 65, 66, 150])
def test_prompts(length: int) -> None:
    """Read in chunks, beside rows that decode; the reply is the same."""
    target, prompt = counting_model(), [(3 * i * i + i) % 10 for i in range(length)]
    engine = new_engine(target, counting_drafter(), num_draft_tokens=3)
    params = SamplingParams(max_tokens=5, seed=1, temperature=1.0)
    plain = engine.submit(prompt, params)
    told = engine.submit(prompt, replace(params, prompt_logprobs=2))
    results = finish(engine)
    found = results[told].prompt_logprobs
    assert results[told].token_ids == results[plain].token_ids
    assert results[plain].prompt_logprobs is None
    assert found is not None
    assert found[0] is None
    assert len(found) == length
    for place, entry in enumerate(found[1:], 1):
        assert entry is not None
        assert entry.token == prompt[place]
        assert entry.logprob == pytest.approx(expected(target, prompt, place))
        assert len(entry.top) == 2


def test_a_prompt_without_numbers_ends_its_request_alone() -> None:
    target = FaultyTarget(10, counting_model().probs)
    target.nan_after = (2, 3)
    engine = new_engine(target, max_batch_size=3)
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    bad, good = engine.submit(PROMPT, params), engine.submit([5, 5, 5], params)
    results = finish(engine)
    assert (results[bad].finish_reason, results[bad].token_ids) == ("error", ())
    assert str(results[bad].error).startswith("NonFiniteScoresError: ")
    assert results[good].finish_reason == "length"
    assert target.cache.slots == []
    target.nan_after = None
    (again,) = generate(engine, [PROMPT], replace(params, prompt_logprobs=None))
    assert again.num_cached_tokens == 0, "what led to nonsense is not found again"


def test_a_cached_prompt_is_read_again() -> None:
    engine = new_engine(counting_model())
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    first, second = (generate(engine, [PROMPT], params)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs


def test_replies_to_one_prompt_share_them() -> None:
    engine = new_engine(counting_model())
    params = SamplingParams(max_tokens=3, prompt_logprobs=0, n=3, temperature=1.0, seed=1)
    engine.submit(PROMPT, params)
    results = finish(engine).values()
    assert len({result.prompt_logprobs for result in results}) == 1
    assert all(len(result.prompt_logprobs or ()) == len(PROMPT) for result in results)
