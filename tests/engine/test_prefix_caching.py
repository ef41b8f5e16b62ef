"""What is cached of earlier requests saves time and changes no text."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from foredraft.core.params import SamplingParams
from foredraft.drafters.base import Drafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.request import RequestOptions
from foredraft.llm import LLM
from foredraft.load import native_decoder
from foredraft.models.native.target import NativeTarget
from foredraft.models.table import TableModel, TokenCache
from foredraft.options import LoadOptions
from tests.drafters.heads import tiny_target
from tests.engine.helpers import counting_model, drain, generate, new_engine

PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=12)


def prompts(count: int = 24, vocab_size: int = 10) -> list[list[int]]:
    """Some begin with all of another one, some part ways in the middle of a block."""
    dice = random.Random(3)
    texts = [[1, 2, 3, 4, 5, 6, 7]]
    for _ in range(count - 1):
        begun = dice.choice(texts)
        rest = [dice.randrange(vocab_size) for _ in range(dice.choice([1, 3, 9]))]
        texts.append([*begun[: dice.randint(0, len(begun))], *rest])
    return texts


def blocked(max_tokens: int | None, block_size: int = 4) -> TableModel:
    target = counting_model()
    target.cache = TokenCache(max_tokens=max_tokens, block_size=block_size)
    return target


@pytest.mark.parametrize("max_tokens", [None, 400, 100, 60])
@pytest.mark.parametrize("drafter", [None, NgramDrafter(min_ngram_size=1)])
def test_texts_are_the_same_with_the_cache_without_it_and_under_pressure(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int | None, drafter: Drafter | None
) -> None:
    monkeypatch.setenv("FOREDRAFT_CHECK", "1")
    asked = prompts()
    plain = new_engine(counting_model(), prefix_caching=False)
    expected = [generate(plain, [prompt], PARAMS)[0].token_ids for prompt in asked]
    target = blocked(max_tokens)
    engine = new_engine(target, drafter, max_batch_size=3)
    for _ in range(2):
        found = generate(engine, asked, PARAMS)
        assert [result.token_ids for result in found] == expected
    stats, usage = engine.stats(), target.cache.usage
    assert stats.prefix_cached_tokens > 0
    assert (usage.used, usage.used + usage.cached + usage.free) == (0, usage.total)
    assert max_tokens is None or usage.total <= max_tokens


def test_switched_off_every_prompt_is_read() -> None:
    target = blocked(None)
    engine = new_engine(target, prefix_caching=False)
    found = generate(engine, [*prompts(), *prompts()], PARAMS)
    assert not any(result.num_cached_tokens for result in found)
    assert target.cache.usage.cached == 0


def test_tenants_do_not_find_each_other_s_texts() -> None:
    engine = new_engine(blocked(None))
    prompt = prompts()[0]
    cached = []
    for tenant in ("a", "b", None, "a", "b", None):
        engine.submit(prompt, PARAMS, RequestOptions(tenant=tenant))
        (result,) = drain(engine).values()
        cached.append(result.num_cached_tokens)
    assert cached == [0, 0, 0, 6, 6, 6]


@pytest.mark.parametrize("decoder", ["fused", "eager", "fixed-shape", "graphed"])
def test_every_decoder_goes_on_from_shared_blocks(decoder: str) -> None:
    """Texts longer than a block, that part ways within one."""
    asked = [tokens * 6 for tokens in prompts(8, 90)]
    asked += [[*left[: len(left) // 2], *right] for left, right in pairwise(asked)]
    texts = []
    for prefix_caching, memory in ((False, None), (True, None), (True, 8 * 64)):
        target = tiny_target(native_decoder(decoder))
        if memory is not None:
            per_token = target.config.kv_shape.bytes_per_token(target.weights.dtype)
            parts = target.config, target.weights, native_decoder(decoder)
            target = NativeTarget(*parts, cache_memory=memory * per_token)
        options = LoadOptions(drafter="ngram", prefix_caching=prefix_caching, max_batch_size=2)
        llm = LLM(target, None, options)
        params = SamplingParams(temperature=0.0, max_tokens=6)
        found = [llm.generate([prompt], params)[0] for prompt in asked]
        found += llm.generate(asked, params)
        texts.append([result.token_ids for result in found])
        assert any(result.num_cached_tokens for result in found) == prefix_caching
        target.cache.check()
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


def test_memory_is_what_the_tokens_need() -> None:
    """Sixteen short requests and a long one."""
    target, most = blocked(None, block_size=64), 0
    engine = new_engine(target, max_batch_size=17, prefix_caching=False)
    engine.submit([1] * 2000, PARAMS)
    for _ in range(16):
        engine.submit([2] * 20, PARAMS)
    while engine.has_work:
        engine.step()
        most = max(most, target.cache.usage.used)
    assert most <= 2048 + 64 + 16 * 64
    assert target.cache.usage.used == 0
