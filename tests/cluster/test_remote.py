"""The engine of a gate over replicas that follow a script: what it does when they are lost."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Counter

from foredraft.core.errors import ConfigError, EngineStoppedError, QueueFullError
from foredraft.core.params import SamplingParams
from foredraft.core.record import SpeculationStats
from foredraft.engine.request import Event, GenerationResult
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.app import api_app
from foredraft.server.context import ServerContext
from foredraft.server.metrics import Metrics
from tests.models.checkpoints import VOCAB_SIZE

remote = pytest.importorskip("foredraft.cluster.remote", reason="clusters need foredraft[ray]")
watch = pytest.importorskip("foredraft.cluster.watch", reason="clusters need foredraft[ray]")
EngineWatch = watch.EngineWatch
exceptions = pytest.importorskip("ray.serve.exceptions")

TAKEN = None
Script = list[Any]
"""Items that a replica sends; an exception is raised there."""


@dataclass
class Replicas:
    """Stands for a `DeploymentHandle`: each call gets the next script; the last one again.

    Attributes:
        asked: what was asked for, with the session of the call.
    """

    scripts: list[Script]
    asked: list[tuple[str, Any]] = field(default_factory=list)
    num_cancelled: int = 0
    _session: str = ""

    def options(self, *, session_id: str, **_: Any) -> Replicas:
        self._session = session_id
        return self

    def remote(self, asked: Any) -> Any:
        self.asked.append((self._session, asked))
        return _Call(self, self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0])


class _Call:
    def __init__(self, replicas: Replicas, script: Script) -> None:
        self._replicas, self._script = replicas, script

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self._script:
            if isinstance(item, Exception) and not isinstance(item, ConfigError):
                raise item
            if isinstance(item, asyncio.Event):
                await item.wait()
                continue
            yield item

    def cancel(self) -> None:
        self._replicas.num_cancelled += 1


class Processes:
    """Stands for the engines' processes.

    Attributes:
        frozen_at: from then on none of them answers any more, by the loop's clock.
        seconds: that an answer takes.
        pause_at: when the gate's own process stands still for a minute.
        ended: those that were ended, with the time.
        number: of them.
    """

    def __init__(self) -> None:
        self.frozen_at = self.pause_at = float("inf")
        self.seconds = 0.0
        self.ended: list[tuple[str, float]] = []
        self.when_ended = asyncio.Event()
        self.number = 1

    async def beat(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self.pause_at:
            assert isinstance(loop, Simulated)
            loop.now, self.pause_at = loop.now + 60.0, float("inf")
        if loop.time() >= self.frozen_at:
            await asyncio.Event().wait()
        await asyncio.sleep(self.seconds)

    def end(self, name: str) -> None:
        self.ended.append((name, asyncio.get_running_loop().time()))
        self.when_ended.set()

    def running(self) -> set[str]:
        return {f"engine {number}" for number in range(self.number)}


class Simulated(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on at once where it would wait."""

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        self.now, select = 0.0, selector.select

        def leap(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        selector.select = leap  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    """Runs coroutines by a clock of its own; calls on threads return at once."""

    async def at_once(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    with asyncio.Runner(loop_factory=Simulated) as runner:
        yield runner


def event(*token_ids: int) -> Event:
    return Event(77, token_ids, 0, ())


def end() -> Event:
    result = GenerationResult(77, "", (1, 2, 3), "length", SpeculationStats(), 5, 2)
    return Event(77, (3,), 0, (), result=result)


def lost() -> Exception:
    error: Exception = pytest.importorskip("ray.exceptions").ActorUnavailableError("gone", None)
    return error


def engine_of(scripts: list[Script], tokenizer: Tokenizer | None = None) -> tuple[Any, Replicas]:
    replicas = Replicas(scripts)
    files = tokenizer.files if tokenizer else {}
    model = remote.RemoteModel("tiny", 512, 512, VOCAB_SIZE, "none", {}, files)
    looks = EngineWatch(Processes(), 2.0)
    return remote.RemoteEngine(replicas, model, Metrics(), 5.0, looks), replicas


def count(counter: Counter) -> float:
    value: float = next(iter(counter.collect())).samples[0].value
    return value


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.0)


async def events_of(engine: Any, **params: Any) -> list[Event]:
    stream = await engine.open_all([([1, 2], SamplingParams(max_tokens=3, **params))])
    return [event async for event in stream]


def test_a_reply_goes_on_behind_what_has_come() -> None:
    engine, replicas = engine_of([[TAKEN, event(1), event(2), lost()], [lost()], [TAKEN, end()]])
    events = asyncio.run(events_of(engine))
    assert [each.token_ids for each in events] == [(1,), (2,), (3,)]
    sessions, asked = zip(*replicas.asked, strict=True)
    assert [each.so_far.token_ids for each in asked] == [(), (1, 2), (1, 2)]
    assert len({each.params.seed for each in asked}) == 1
    assert asked[0].params.seed is not None
    assert len(set(sessions)) == 3  # each is at another place of the ring
    assert {each.request_id for each in events} == {0}
    assert (count(engine._resumed), count(engine._lost)) == (2, 0)


def test_a_reply_that_loses_one_replica_after_another_says_so() -> None:
    engine, replicas = engine_of([[TAKEN, event(1), lost()], [lost()]])
    with pytest.raises(EngineStoppedError, match="replicas were lost"):
        asyncio.run(events_of(engine))
    assert count(engine._lost) == 1
    assert len(replicas.asked) == 1 + remote._MOST_LOST


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (ConfigError("no such thing"), ConfigError),
        (
            exceptions.BackPressureError(num_queued_requests=9, max_queued_requests=1),
            QueueFullError,
        ),
        (exceptions.DeploymentUnavailableError(None), EngineStoppedError),
    ],
)
def test_what_refuses_a_request_is_told_as_it_is(said: Exception, error: type[Exception]) -> None:
    engine, _ = engine_of([[said]])
    with pytest.raises(error):
        asyncio.run(events_of(engine))
    assert count(engine._lost) == 0
    assert engine.stats().running == 0


@pytest.mark.parametrize("silence", [2.0, 5.0])
@pytest.mark.parametrize("phase", [0.0, 0.01, 0.3, 0.49, 0.5, 0.74, 0.99])
def test_replies_go_on_elsewhere_within_the_silence(
    monkeypatch: pytest.MonkeyPatch, simulated: asyncio.Runner, silence: float, phase: float
) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.2)

    async def run() -> float:
        processes = Processes()
        processes.frozen_at = 7.0 + phase
        frozen = [TAKEN, event(1), processes.when_ended]
        engine, _ = engine_of([[*frozen, lost()], [TAKEN, event(2), end()]])
        engine.watch = EngineWatch(processes, silence)
        engine.watch.begin()
        assert len(await events_of(engine)) == 3
        assert [name for name, _ in processes.ended] == ["engine 0"]
        await engine.aclose()
        return asyncio.get_running_loop().time() - processes.frozen_at

    assert 0.0 < simulated.run(run()) <= silence


@pytest.mark.parametrize(("silence", "slow"), [(2.0, 0.2), (5.0, 3.2)])
def test_an_engine_that_is_slow_or_was_stopped_beside_its_gate_goes_on(
    simulated: asyncio.Runner, silence: float, slow: float
) -> None:
    processes = Processes()
    processes.seconds, processes.pause_at = slow, 20.0

    async def run() -> None:
        looks = EngineWatch(processes, silence)
        looks.begin()
        await asyncio.sleep(300.0)
        assert processes.pause_at == float("inf"), "the gate stood still"
        assert processes.ended == []
        assert looks.has_engine
        processes.frozen_at, processes.number = 0.0, 0
        await asyncio.sleep(10.0)
        assert len(processes.ended) == 1, "it has had no reply"
        assert not looks.has_engine
        looks.close()

    simulated.run(run())


def test_a_request_that_waits_for_an_engine_is_answered_and_refused_in_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_AT_ONCE", 0.05)
    engine, _ = engine_of([[asyncio.Event()]])
    engine._patience = 0.3

    async def run() -> None:
        began = asyncio.get_running_loop().time()
        stream = await engine.open_all([([1, 2], SamplingParams())])
        assert asyncio.get_running_loop().time() - began < 0.25
        with pytest.raises(QueueFullError, match="no engine had room"):
            await anext(stream)

    asyncio.run(run())


def test_whoever_leaves_ends_all_replies() -> None:
    engine, replicas = engine_of([[TAKEN, event(1), asyncio.Event()]])

    async def leave() -> None:
        stream = await engine.open_all([([1, 2], SamplingParams(n=2))])
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert replicas.num_cancelled == 2
    assert engine.stats().running == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_lost_reply_ends_with_an_error_in_its_dialect(
    tokenizer_directory: Path, path: str, body: dict[str, Any]
) -> None:
    engine, _ = engine_of([[TAKEN, event(1), lost()], [lost()]], Tokenizer(tokenizer_directory))

    def connect(_: ServerContext) -> Any:
        return engine

    async def ask() -> tuple[str, httpx.Response]:
        loaded = asyncio.Event()
        app = api_app(connect, when_loaded=lambda _: loaded.set())
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
            ) as client,
        ):
            await loaded.wait()
            stream = await client.post(path, json=body | {"stream": True})
            return stream.text, await client.post(path, json=body)

    streamed, whole = asyncio.run(ask())
    assert '"error"' in streamed
    assert "the engine is not running" in streamed
    assert whole.status_code == 503
    assert "the engine is not running" in whole.text
