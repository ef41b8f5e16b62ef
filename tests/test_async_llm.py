"""`AsyncLLM`: many tasks on one engine thread, and their errors when it cannot go on."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, AsyncLLM, Grammar, SamplingParams
from foredraft.async_llm import _idle_work
from foredraft.core.errors import (
    ConfigError,
    EngineStoppedError,
    GrammarError,
    PromptError,
    QueueFullError,
)
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel
from foredraft.models.text.grammars import Grammars
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer

VOCAB = 12
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
PROMPTS = [[i % VOCAB, 2, 3, i % VOCAB] for i in range(12)]


class SlowTarget(TableModel):
    """A `TableModel` whose forwards wait until they may begin."""

    gate: threading.Event
    fault: BaseException | None = None

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        assert self.gate.wait(10)
        if self.fault is not None:
            raise self.fault
        return super().score(rows, taps)


def slow_target(is_open: bool = True) -> SlowTarget:
    target = SlowTarget.random(VOCAB, seed=5)
    assert isinstance(target, SlowTarget)
    target.gate = threading.Event()
    if is_open:
        target.gate.set()
    return target


def new_llm(target: TableModel | None = None, drafter: str = "ngram", **options: Any) -> LLM:
    return LLM(target or slow_target(), None, LoadOptions(drafter=drafter, **options))


def alone(prompt: Sequence[int], params: SamplingParams = PARAMS) -> tuple[int, ...]:
    return new_llm(drafter="none").generate([prompt], params)[0].token_ids


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


async def test_many_tasks_get_what_each_would_get_alone() -> None:
    async with AsyncLLM(new_llm(max_batch_size=5)) as llm:
        results = await asyncio.gather(*(llm.generate(p, PARAMS) for p in PROMPTS))
        stats = llm.stats()
    assert (stats.running, stats.waiting, stats.finished) == (0, 0, {"length": 12})
    assert stats.committed == 12 * 30
    assert [result.token_ids for result in results] == [alone(prompt) for prompt in PROMPTS]


async def test_events_of_a_stream_add_up_to_its_result() -> None:
    async with AsyncLLM(new_llm()) as llm:
        events = [event async for event in llm.stream(PROMPTS[0], PARAMS)]
        assert all(event.result is None for event in events[:-1])
        result = events[-1].result
        assert result is not None
        assert tuple(t for event in events for t in event.token_ids) == result.token_ids


def test_loops_of_several_threads_share_one() -> None:
    llm = AsyncLLM(new_llm())
    with ThreadPoolExecutor(6) as pool:
        run = pool.map(lambda prompt: asyncio.run(llm.generate(prompt, PARAMS)), PROMPTS[:6])
    asyncio.run(llm.aclose())
    assert [result.token_ids for result in run] == [alone(prompt) for prompt in PROMPTS[:6]]


def test_threads_step_in_turns() -> None:
    """A reader that loops does not keep another one out until its own reply is over."""
    llm = new_llm(max_batch_size=4)
    first = llm.stream([1], SamplingParams(max_tokens=3000))
    next(first)
    stop = threading.Event()

    def drive() -> None:
        for _ in first:
            if stop.is_set():
                return

    thread = threading.Thread(target=drive)
    thread.start()
    assert len(llm.generate([2], PARAMS)[0].token_ids) == 30
    was_running = llm.engine.stats().running
    stop.set()
    thread.join()
    assert was_running == 1


async def test_a_step_wakes_a_loop_once() -> None:
    loop, calls = asyncio.get_running_loop(), 0
    call = loop.call_soon_threadsafe

    def counting(callback: Callable[..., Any], *args: Any, **more: Any) -> asyncio.Handle:
        nonlocal calls
        calls += callback.__module__ == AsyncLLM.__module__
        return call(callback, *args, **more)

    loop.call_soon_threadsafe = counting  # type: ignore[method-assign,assignment]
    target = slow_target(is_open=False)
    async with AsyncLLM(new_llm(target, drafter="none", max_batch_size=6)) as llm:
        streams = [await llm.open(prompt, PARAMS) for prompt in PROMPTS[:6]]
        target.gate.set()
        texts = [[e.token_ids async for e in stream] for stream in streams]
        steps = llm.stats().steps
        assert 0 < calls <= steps < 60, "30 tokens each, six at a time, and some began later"
    assert [sum(ids, ()) for ids in texts] == [alone(p) for p in PROMPTS[:6]]


async def test_who_reads_last_is_woken_whoever_stepped() -> None:
    """An `LLM` beside it may make the last step of its requests; its own thread then sleeps."""
    llm = new_llm(drafter="none")
    async with AsyncLLM(llm) as running:
        for seed in range(20):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=3)
            beside = asyncio.to_thread(llm.generate, [PROMPTS[0]], params)
            both = asyncio.gather(running.generate(PROMPTS[1], params), beside)
            await asyncio.wait_for(both, 10)


async def test_the_llm_can_be_used_beside_it() -> None:
    llm = new_llm(max_batch_size=4)
    async with AsyncLLM(llm) as served:
        tasks = [asyncio.create_task(served.generate(p, PARAMS)) for p in PROMPTS]
        direct = await asyncio.to_thread(llm.generate, PROMPTS, PARAMS)
        results = await asyncio.gather(*tasks)
    assert [r.token_ids for r in direct] == [r.token_ids for r in results]
    assert [r.token_ids for r in direct] == [alone(p) for p in PROMPTS]


async def test_a_closed_iterator_aborts_its_request_within_one_step() -> None:
    target = slow_target()
    async with AsyncLLM(new_llm(target)) as llm:
        stream = llm.stream([1], SamplingParams(max_tokens=4000))
        await anext(stream)
        target.gate.clear()
        await stream.aclose()  # type: ignore[attr-defined]
        steps = llm.stats().steps
        target.gate.set()
        await until(lambda: llm.stats().running == 0)
        assert llm.stats().steps <= steps + 2  # that under way, and one begun meanwhile
        assert llm.stats().finished == {"cancelled": 1}
        assert target.cache.slots == []


async def test_a_cancelled_task_and_a_dropped_stream_abort_theirs() -> None:
    target = slow_target()
    async with AsyncLLM(new_llm(target)) as llm:
        params = SamplingParams(max_tokens=4000)
        task = asyncio.create_task(llm.generate([1], params))
        stream = await llm.open([2], params)
        await anext(stream)
        await until(lambda: llm.stats().running == 2)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: llm.stats().running == 1)
        del stream
        gc.collect()
        await until(lambda: llm.stats().running == 0)
        assert target.cache.slots == []


async def test_too_many_requests_are_refused_and_room_comes_back() -> None:
    target = slow_target(is_open=False)
    async with AsyncLLM(new_llm(target, max_batch_size=2), max_waiting=1) as llm:
        streams = [await llm.open([i], PARAMS) for i in range(3)]
        with pytest.raises(QueueFullError, match="3 requests are under way and 3 are the most"):
            await llm.open([5], PARAMS)
        with pytest.raises(QueueFullError):
            await anext(llm.stream([5], PARAMS))
        target.gate.set()
        for stream in streams:
            assert [event async for event in stream][-1].result is not None
        assert len((await llm.generate([5], PARAMS)).token_ids) == 30


async def test_what_cannot_be_used_is_refused_at_once_and_costs_no_place() -> None:
    async with AsyncLLM(new_llm(max_batch_size=1), max_waiting=0) as llm:
        for _ in range(3):
            with pytest.raises(PromptError, match="empty"):
                await llm.open([], PARAMS)
            with pytest.raises(ConfigError, match="stop strings"):
                await llm.open([1], SamplingParams(stop="a"))
            with pytest.raises(ConfigError, match="SamplingParams"):
                await llm.open([1], {"top_k": 1})  # type: ignore[arg-type]
        await llm.generate([1], PARAMS)
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncLLM(new_llm(), max_waiting=-1)


async def test_a_fault_of_the_thread_reaches_everybody(caplog: pytest.LogCaptureFixture) -> None:
    target = slow_target(is_open=False)
    llm = AsyncLLM(new_llm(target, max_batch_size=1))

    class Lost(BaseException):
        """Nothing that the engine takes for a fault of one request."""

    streams = [await llm.open([i], PARAMS) for i in range(3)]
    target.fault = Lost("the machine goes down")
    target.gate.set()
    for stream in streams:
        with pytest.raises(EngineStoppedError, match="Lost: the machine goes down"):
            [event async for event in stream]
    assert not llm.is_healthy
    with pytest.raises(EngineStoppedError, match="takes no more requests"):
        await llm.generate([1], PARAMS)
    await llm.aclose()
    assert target.cache.slots == []
    assert "the machine goes down" in caplog.text


async def test_closing_waits_for_what_is_under_way_and_takes_nothing_new() -> None:
    llm = AsyncLLM(new_llm())
    stream = await llm.open([1], PARAMS)
    await llm.aclose()
    with pytest.raises(EngineStoppedError, match="closed"):
        await llm.open([1], PARAMS)
    last = [event async for event in stream][-1].result
    assert last is not None
    assert last.token_ids == alone([1])
    await llm.aclose()  # a second call is harmless


async def test_closing_at_once_cancels_what_is_under_way() -> None:
    llm = AsyncLLM(new_llm())
    streams = [await llm.open([1], SamplingParams(max_tokens=4000)) for _ in range(20)]
    await anext(streams[0])
    await llm.aclose(drain=False)
    for stream in streams:
        result = [event async for event in stream][-1].result
        assert result is not None
        assert result.finish_reason == "cancelled"


def test_a_loop_that_is_gone_does_not_disturb_the_others() -> None:
    target = slow_target(is_open=False)
    llm = AsyncLLM(new_llm(target))
    kept: list[Any] = []

    async def abandon() -> None:
        kept.append(await llm.open([1], SamplingParams(max_tokens=4000)))

    asyncio.run(abandon())
    target.gate.set()

    async def run() -> None:
        assert (await llm.generate([2], PARAMS)).token_ids == alone([2])
        await until(lambda: llm.stats().running == 0)
        assert llm.stats().finished.get("cancelled") == 1, "the reply without a reader"
        await llm.aclose()

    asyncio.run(run())


def test_an_idle_one_that_nobody_holds_ends_its_thread() -> None:
    llm = AsyncLLM(new_llm())
    thread = llm.worker._thread
    del llm
    gc.collect()
    assert not thread.is_alive()


async def test_memory_is_given_back_after_a_while_without_requests() -> None:
    llm = new_llm()
    found: list[int] = []
    llm.give_memory_back = lambda: found.append(llm.engine.num_live)  # type: ignore[method-assign]
    async with AsyncLLM(llm, give_back_after=0.2) as engine:
        for number in (1, 2):
            await engine.generate([1, 2, 3], PARAMS)
            await until(lambda number=number: len(found) == number)  # type: ignore[misc]
    assert found == [0, 0]


def test_memory_is_given_back_once_after_each_work() -> None:
    llm = new_llm()
    found: list[int] = []
    llm.give_memory_back = lambda: found.append(1)  # type: ignore[method-assign]
    idle = _idle_work(llm, None, 10.0)
    assert [idle(seconds) for seconds in (0.0, 4.0)] == [10.0, 6.0]
    assert not found
    assert [idle(seconds) for seconds in (10.0, 20.0)] == [None, None]
    assert len(found) == 1
    assert [idle(seconds) for seconds in (0.5, 10.5)] == [9.5, None]
    assert len(found) == 2


def test_cached_prompts_are_given_up() -> None:
    llm = new_llm()
    llm.generate([[1, 2, 3] * 40], PARAMS)
    llm.generate([[1, 2, 3] * 40], PARAMS)
    before = llm.engine.stats().prefix_cached_tokens
    assert before > 0
    llm.give_memory_back()
    (result,) = llm.generate([[1, 2, 3] * 40], PARAMS)
    assert result.num_cached_tokens == 0
    assert llm.engine.stats().prefix_cached_tokens == before


async def test_slow_grammars_keep_no_other_request_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than asyncio has threads."""
    save_tokenizer(tmp_path)
    go_on, compiled = threading.Event(), list[str]()

    def compile_slowly(self: Grammars, grammar: Grammar) -> Any:
        compiled.append(grammar.source)
        assert go_on.wait(20)
        raise GrammarError("too slow")

    monkeypatch.setattr(Grammars, "_compile", compile_slowly)
    target = TableModel.random(VOCAB_SIZE, seed=5, order=1)
    llm = LLM(target, Tokenizer(tmp_path), LoadOptions(drafter="none"))
    async with AsyncLLM(llm) as engine:
        asked = [
            asyncio.create_task(
                engine.generate([1], SamplingParams(grammar=Grammar.regex(f"a{number}")))
            )
            for number in range(40)
        ]
        await until(lambda: len(compiled) == 2)
        await asyncio.wait_for(engine.generate([1], PARAMS), 20)
        asked[-1].cancel()
        go_on.set()
        for outcome in await asyncio.gather(*asked[:-1], return_exceptions=True):
            assert isinstance(outcome, GrammarError)
