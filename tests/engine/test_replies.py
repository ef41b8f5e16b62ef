"""Several replies to one prompt: read once, each with its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from foredraft import LLM, AsyncLLM
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.engine.helpers import counting_model, finish, generate, limited, new_engine

PROMPT = [1, 2, 3, 4, 5, 1, 2]
PARAMS = SamplingParams(temperature=1.0, seed=2**64 - 2, max_tokens=20, n=4)


def expected() -> list[tuple[int, ...]]:
    params = [replace(PARAMS, n=1, seed=(2**64 - 2 + i) % 2**64) for i in range(4)]
    return [generate(new_engine(counting_model()), [PROMPT], p)[0].token_ids for p in params]


@pytest.mark.parametrize("max_batch_size", [1, 3, 8])
@pytest.mark.parametrize("max_step_tokens", [2, 512])
def test_each_is_the_text_of_its_seed(max_batch_size: int, max_step_tokens: int) -> None:
    target = counting_model()
    drafter = NgramDrafter(min_ngram_size=1)
    engine = new_engine(
        target, drafter, max_batch_size=max_batch_size, max_step_tokens=max_step_tokens
    )
    parent = engine.submit(PROMPT, PARAMS)
    results = sorted(finish(engine).values(), key=lambda result: result.index)
    assert [result.index for result in results] == [0, 1, 2, 3]
    assert {result.parent_id for result in results} == {parent}
    assert [result.token_ids for result in results] == expected()
    assert target.cache.slots == []


def test_the_prompt_is_read_once() -> None:
    read: list[int] = []

    class Watched(TableModel):
        def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
            read.extend(len(row.pending) for row in rows)
            return super().score(rows, taps)

    engine = new_engine(Watched.random(10, seed=3))
    engine.submit(PROMPT, PARAMS)
    results = finish(engine)
    assert [n for n in read if n > 1] == [len(PROMPT)]
    assert [r.num_cached_tokens for r in results.values()].count(len(PROMPT) - 1) == 3


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_the_others_go_on_without_the_first(num_steps: int) -> None:
    target = counting_model()
    engine = new_engine(target, max_step_tokens=4)
    parent = engine.submit(PROMPT, PARAMS)
    for _ in range(num_steps):
        engine.step()
    engine.cancel(parent)
    results = [event.result for event in engine.run() if event.result is not None]
    assert {r.index: r.token_ids for r in results} == dict(enumerate(expected()[1:], start=1))
    assert target.cache.slots == []


def test_with_little_memory_all_of_them_end() -> None:
    target = limited(counting_model(), 40)
    engine = new_engine(target)
    engine.submit(PROMPT, PARAMS)
    results = sorted(finish(engine).values(), key=lambda result: result.index)
    assert [result.token_ids for result in results] == expected()


def test_a_drawn_seed_is_reported_for_each() -> None:
    engine = new_engine(counting_model())
    engine.submit(PROMPT, replace(PARAMS, seed=None))
    seeds = [result.seed for result in finish(engine).values()]
    assert len(set(seeds)) == 4
    assert (max(seeds) - min(seeds)) in (3, *range(2**64 - 4, 2**64))


async def test_llm_and_async_llm_give_them_in_order() -> None:
    llm = LLM(counting_model(), None, LoadOptions(drafter="ngram"))
    results = llm.generate([PROMPT, [3]], PARAMS)
    assert [result.index for result in results] == [0, 1, 2, 3] * 2
    assert [result.token_ids for result in results[:4]] == expected()
    async with AsyncLLM(llm) as served:
        replies = await served.generate_all(PROMPT, PARAMS)
        assert [reply.token_ids for reply in replies] == expected()
        with pytest.raises(ConfigError, match="generate_all"):
            await served.generate(PROMPT, PARAMS)
        stream = await served.open(PROMPT, PARAMS)
        events = [event async for event in stream]
        assert sorted(event.index for event in events if event.result) == [0, 1, 2, 3]
        assert {event.parent_id for event in events} == {stream.request_ids[0]}
