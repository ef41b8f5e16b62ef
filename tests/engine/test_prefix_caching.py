"""Cached entries of earlier requests save time and change no text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from foredraft.cache.base import KVShape, owner_of
from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import RowStep
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.engine.engine import Engine, EngineOptions
from foredraft.engine.guard import LoadedDrafter
from foredraft.engine.policy import Policy
from foredraft.llm import LLM
from foredraft.load import native_decoder
from foredraft.models.base import ScoreRow, Scores
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "token_recycling"])
def test_drafts_cost_no_hits(drafter: str, temperature: float) -> None:
    """A conversation finds as much of itself in the cache with drafts as without."""

    def hits(speculation: str) -> tuple[list[int], int]:
        """Of each turn the tokens found; and how many were drafted in all."""
        llm = LLM(blocked(None), None, LoadOptions(drafter=drafter, num_draft_tokens=4))
        params = SamplingParams.of(
            temperature=temperature, seed=5, max_tokens=23, speculation=speculation
        )
        text, found, drafted = [1, 2, 3, 1, 2, 3], list[int](), 0
        for turn in range(8):
            [reply] = llm.generate([text], params)
            text = [*text, *reply.token_ids, 4, turn % 10, 5]
            found.append(reply.num_cached_tokens)
            drafted += reply.stats.drafted
        return found, drafted

    (plainly, _), (with_drafts, drafted) = hits("off"), hits("auto")
    assert with_drafts == plainly
    assert sum(plainly) > 400
    assert drafted > 20, "there was something that could cost hits"


def test_tenants_do_not_find_each_other_s_texts() -> None:
    engine = new_engine(blocked(None))
    prompt = prompts()[0]
    cached = []
    for tenant in ("a", "b", None, "a", "b", None):
        engine.submit(prompt, PARAMS, tenant=tenant)
        (result,) = drain(engine).values()
        cached.append(result.num_cached_tokens)
    assert cached == [0, 0, 0, 6, 6, 6]


@pytest.mark.parametrize("decoder", ["fused", "eager", "fixed-shape"])
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


# ----------------------------------------------------------------------- requests that run together


class Reads(TableModel):
    """Counts the tokens that it reads: of prompts, and of replies one by one."""

    num_read = 0

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        self.num_read += sum(len(row.pending) for row in rows if len(row.pending) > 1)
        return super().score(rows, taps)


def reading(max_tokens: int | None = None) -> Reads:
    target = Reads(10, counting_model().probs)
    target.cache = TokenCache(max_tokens=max_tokens, block_size=4)
    return target


class Keeper(BaseDrafter):
    """Keeps an entry a token in cache layers, like a head, and drafts nothing."""

    def __init__(self, target: TableModel) -> None:
        self.layers = (target.cache.add_layers(KVShape(1, 1, 1), torch.float32),)
        self._slots: dict[int, int] = {}

    def begin(self, row: DraftRow) -> None:
        self._slots[row.request_id] = row.slot

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [NO_PROPOSAL] * len(rows)

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            entries_HTD = torch.zeros(1, seen.end - seen.context, 1)
            slot = self._slots[seen.request_id]
            self.layers[0].write(0, slot, seen.context, entries_HTD, entries_HTD)


SYSTEM = [i * 7 % 10 for i in range(60)]


@pytest.mark.parametrize("drafts", ["nobody", "a head", "another than the head"])
def test_a_burst_with_one_system_prompt_reads_it_once_while_it_runs(drafts: str) -> None:
    target = reading()
    head = LoadedDrafter(Keeper(target), target, "head")
    copies = LoadedDrafter(NgramDrafter(), target, "copies", joins_late=True)
    name = {"nobody": None, "a head": "head", "another than the head": "copies"}[drafts]
    policy = Policy(FixedBudget(4, drafter=name), [head, copies])
    engine = Engine(target, policy, EngineOptions(max_batch_size=12, max_step_tokens=16))
    asked = [[*SYSTEM, i % 10, i // 3, 5] for i in range(12)]
    numbers = [engine.submit(prompt, PARAMS) for prompt in asked]
    results = drain(engine)
    alone = new_engine(counting_model())
    for number, prompt in zip(numbers, asked, strict=True):
        assert results[number].token_ids == generate(alone, [prompt], PARAMS)[0].token_ids
    assert target.num_read <= len(SYSTEM) + 12 * (3 + target.cache.block_size)
    assert [results[n].num_cached_tokens >= len(SYSTEM) for n in numbers] == [False] + [True] * 11


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_each_prompt_of_several_replies_is_read_once_and_kept_whoever_drafts(
    max_tokens: int | None,
) -> None:
    """Twelve prompts of four replies each, which the head does not follow, as under load."""
    target = reading(None if max_tokens is None else 3 * max_tokens)
    head = LoadedDrafter(Keeper(target), target, "head")
    copies = LoadedDrafter(NgramDrafter(), target, "copies", joins_late=True)
    policy = Policy(FixedBudget(4, drafter="copies"), [head, copies])
    engine = Engine(target, policy, EngineOptions(max_batch_size=8, max_step_tokens=16))
    dice = random.Random(5)
    asked = [[i % 10, i // 10, *(dice.randrange(10) for _ in range(30))] for i in range(12)]
    for prompt in asked:
        engine.submit(prompt, replace(PARAMS, n=4))
    assert len(drain(engine)) == 48
    assert engine.stats().preemptions == 0
    assert target.num_read <= 12 * 32
    if max_tokens is None:
        assert [target.cache.num_shared(owner_of(None), prompt) for prompt in asked] == [32] * 12


def test_nobody_waits_for_a_leader_that_is_gone() -> None:
    target = reading()
    engine = new_engine(target, max_batch_size=4, max_step_tokens=4)
    leader = engine.submit([*SYSTEM, 1], PARAMS)
    follower = engine.submit([*SYSTEM, 2], PARAMS)
    other = engine.submit([9, 9, 9], PARAMS)
    for _ in range(4):
        engine.step()
    assert engine.stats().waiting == 1
    engine.cancel(leader)
    engine.step()
    assert engine.stats().waiting == 0
    results = drain(engine)
    assert {*results} <= {follower, other}
    assert results[follower].num_cached_tokens == 16


def test_a_place_in_the_batch_is_kept_for_who_waits_for_a_leader() -> None:
    target = reading()
    engine = new_engine(target, max_batch_size=3, max_step_tokens=4)
    asked = [[*SYSTEM, 1], [*SYSTEM, 2], [9, 9], [8, 8]]
    numbers = [engine.submit(prompt, replace(PARAMS, max_tokens=100)) for prompt in asked]
    while engine.stats().waiting > 1:
        engine.step()
    running = [request.request_id for request in engine._scheduler.running]
    assert running == numbers[:3]
