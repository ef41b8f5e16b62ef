"""Several readers, threads and replies on one engine: each gets its own, and all of it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, AsyncLLM
from foredraft.core.errors import ConfigError, PromptError
from foredraft.core.params import SamplingParams
from foredraft.drafters.text.ngram import NgramDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.request import Event
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions
from tests.engine.helpers import (
    counting_drafter,
    counting_model,
    finish,
    generate,
    new_engine,
    noting_model,
)
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint

PARAMS = SamplingParams(max_tokens=20)


def text_of(events: list[Event]) -> str:
    return "".join(piece.text for event in events for piece in event.pieces)


def last_of(events: list[Event]) -> Event:
    assert events[-1].result is not None
    assert all(event.result is None for event in events[:-1])
    assert text_of(events) == events[-1].result.text
    return events[-1]


def test_streams_read_in_turns_lose_nothing() -> None:
    engine = new_engine(counting_model(), counting_drafter(wrong_every=3))
    first, second = engine.stream([[1]], PARAMS), engine.stream([[5]], PARAMS)
    seen: tuple[list[Event], list[Event]] = ([], [])
    for one, other in itertools.zip_longest(first, second):
        seen[0].extend([one] if one else [])
        seen[1].extend([other] if other else [])
    for events, prompt in zip(seen, ([1], [5]), strict=True):
        result = last_of(events).result
        expected = generate(new_engine(counting_model()), [prompt], PARAMS)[0]
        assert result is not None
        assert result.token_ids == expected.token_ids


def test_closing_a_stream_cancels_its_request_only() -> None:
    target = counting_model()
    engine = new_engine(target)
    first, second = engine.stream([[1], [2]], PARAMS), engine.stream([[5]], PARAMS)
    next(first)
    begun = next(second)
    close(first)
    assert len(target.cache.slots) == 1
    last_of([begun, *second])
    assert target.cache.slots == []
    assert not engine.has_work


def close(stream: Iterator[Event]) -> None:
    stream.close()  # type: ignore[attr-defined]


def test_a_stream_that_nobody_reads_submits_nothing() -> None:
    engine = new_engine(counting_model())
    stream = engine.stream([[1]], PARAMS)
    assert not engine.has_work
    close(stream)
    assert not engine.has_work


def test_one_bad_prompt_and_nothing_is_generated() -> None:
    target = counting_model()
    engine = new_engine(target)
    with pytest.raises(PromptError):
        list(engine.stream([[1], [2], []], PARAMS))
    assert not engine.has_work
    assert target.cache.slots == []


def test_a_request_cancelled_behind_its_stream_ends_it() -> None:
    engine = new_engine(counting_model())
    stream = engine.stream([[1]], PARAMS)
    begun = next(stream)
    engine.cancel(begun.request_id)
    result = last_of([begun, *stream]).result
    assert result is not None
    assert result.finish_reason == "cancelled"


def test_preparing_a_request_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may take seconds to compile."""
    engine = new_engine(counting_model())
    prepare = engine.prepare

    def while_another_steps(*args: Any, **options: Any) -> Any:
        other = threading.Thread(target=engine.step)
        other.start()
        other.join(10)
        assert not other.is_alive()
        return prepare(*args, **options)

    monkeypatch.setattr(engine, "prepare", while_another_steps)
    last_of(list(engine.stream([[1]], PARAMS)))


# -------------------------------------------------------------------- several threads on one engine


SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=25)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> NativeTarget:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory, NATIVE_CONFIGS["llama"]())
    return NativeTarget.load(directory, new_decoder=EagerDecoder)


def read(streams: Engine, prompt: list[int], params: SamplingParams = SAMPLED) -> tuple[int, ...]:
    events = list(streams.stream([prompt], params))
    assert events[-1].result is not None
    assert events[-1].result.error is None
    assert tuple(t for event in events for t in event.token_ids) == events[-1].result.token_ids
    return events[-1].result.token_ids


def test_threads_take_turns_and_each_gets_its_own_text(target: NativeTarget) -> None:
    prompts = [[i + 1, 2, 3, i + 1, 2] for i in range(12)]
    alone = [read(new_engine(target, new_decoder=None), prompt) for prompt in prompts]
    streams = new_engine(target, NgramDrafter(min_ngram_size=1), max_batch_size=3, new_decoder=None)
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda prompt: read(streams, prompt), prompts)) == alone
    assert target.cache.allocate() == 0
    target.cache.free(0)


def test_a_stream_closed_from_within_a_step_ends_after_it() -> None:
    """As the garbage collector does, which may run at any moment."""
    engine = new_engine(counting_model(), trace=lambda record: engine.cancel(0) and None)
    engine.submit([1], SAMPLED)
    engine.step()
    assert not engine.has_work


OPEN_STREAM = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.native.target import NativeTarget
from foredraft.options import LoadOptions

llm = LLM(NativeTarget.load(Path({model!r})), None, LoadOptions(drafter="ngram"))
events = llm.stream([1, 2, 3], SamplingParams(max_tokens=500))
other = llm.stream([4, 5], SamplingParams(max_tokens=500))
for stream in (events, other):
    next(stream)
{end}
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise ValueError('over')", 1)])
def test_an_open_stream_does_not_abort_the_interpreter(
    end: str, status: int, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama"]())
    root = str(Path(__file__).parents[2])
    code = OPEN_STREAM.format(root=root, model=str(tmp_path), end=end)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr[-2000:]
    assert "Exception ignored" not in done.stderr


# -------------------------------------------------------------------- several replies to one prompt


PROMPT = [1, 2, 3, 4, 5, 1, 2]
FOUR = SamplingParams(temperature=1.0, seed=2**64 - 2, max_tokens=20, n=4)


def expected() -> list[tuple[int, ...]]:
    params = [replace(FOUR, n=1, seed=(2**64 - 2 + i) % 2**64) for i in range(4)]
    return [generate(new_engine(counting_model()), [PROMPT], p)[0].token_ids for p in params]


@pytest.mark.parametrize("max_batch_size", [1, 3, 8])
@pytest.mark.parametrize("max_step_tokens", [2, 512])
def test_each_is_the_text_of_its_seed(max_batch_size: int, max_step_tokens: int) -> None:
    target = counting_model()
    drafter = NgramDrafter(min_ngram_size=1)
    engine = new_engine(
        target, drafter, max_batch_size=max_batch_size, max_step_tokens=max_step_tokens
    )
    parent = engine.submit(PROMPT, FOUR)
    results = sorted(finish(engine).values(), key=lambda result: result.index)
    assert [result.index for result in results] == [0, 1, 2, 3]
    assert {result.parent_id for result in results} == {parent}
    assert [result.token_ids for result in results] == expected()
    assert target.cache.slots == []


def test_the_prompt_is_read_once() -> None:
    read: list[int] = []
    engine = new_engine(noting_model(read))
    engine.submit(PROMPT, FOUR)
    results = finish(engine)
    assert [n for n in read if n > 1] == [len(PROMPT)]
    assert [r.num_cached_tokens for r in results.values()].count(len(PROMPT) - 1) == 3


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_the_others_go_on_without_the_first(num_steps: int) -> None:
    target = counting_model()
    engine = new_engine(target, max_step_tokens=4)
    parent = engine.submit(PROMPT, FOUR)
    for _ in range(num_steps):
        engine.step()
    engine.cancel(parent)
    results = [event.result for event in engine.run() if event.result is not None]
    assert {r.index: r.token_ids for r in results} == dict(enumerate(expected()[1:], start=1))
    assert target.cache.slots == []


async def test_llm_and_async_llm_give_them_in_order() -> None:
    llm = LLM(counting_model(), None, LoadOptions(drafter="ngram"))
    results = llm.generate([PROMPT, [3]], FOUR)
    assert [result.index for result in results] == [0, 1, 2, 3] * 2
    assert [result.token_ids for result in results[:4]] == expected()
    async with AsyncLLM(llm) as served:
        with pytest.raises(ConfigError, match="use stream"):
            await served.generate(PROMPT, FOUR)
        stream = await served.open(PROMPT, FOUR)
        events = [event async for event in stream]
        replies = sorted((e.index, e.result.token_ids) for e in events if e.result)
        assert replies == [*enumerate(expected())]
        assert {event.parent_id for event in events} == {stream.request_ids[0]}
