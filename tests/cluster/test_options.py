"""Options of a cluster, without one."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.affinity import routing_hits
from foredraft.cli.cluster import ClusterAsked
from foredraft.core.errors import ConfigError, EngineStoppedError
from foredraft.core.params import SamplingParams
from foredraft.engine.request import ReplySoFar
from foredraft.options import LoadOptions
from foredraft.server.metrics import Metrics
from foredraft.server.settings import ServerSettings
from tests.cluster.conftest import WITH_START, Served, actors, serving
from tests.cluster.models import MAX_BATCH_SIZE, load
from tests.server.conftest import wait_until

pytest.importorskip("ray.serve", reason="clusters need foredraft[ray]")


def test_what_a_cluster_does_not_do_is_refused() -> None:
    from foredraft.cluster.deploy import ClusterOptions, application

    settings = ServerSettings(prove_every=3)
    with pytest.raises(ConfigError, match="--prove-every"):
        application(lambda: None, 1, settings, ClusterOptions())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("asked", "threads"),
    [({}, None), ({"replicas": 2}, 3), ({"autoscale": "1:3"}, 2), ({"address": "auto"}, None)],
)
def test_engines_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], threads: int | None
) -> None:
    for module in ("foredraft.cli.cluster", "foredraft.options"):
        monkeypatch.setattr(f"{module}.available_cpus", lambda: 6)
    cluster = ClusterAsked(True, **asked)
    assert cluster._shared(LoadOptions()).threads == threads
    assert cluster._shared(LoadOptions(threads=1)).threads == 1


def test_the_time_of_silence_is_an_option() -> None:
    assert ClusterAsked(True, engine_timeout=9.0).sizes()["engine_timeout"] == 9.0
    with pytest.raises(ConfigError, match="--engine-timeout"):
        ClusterAsked(False, engine_timeout=9.0)


def test_a_gate_shows_no_figures_that_it_does_not_have() -> None:
    metrics = Metrics()
    assert b"spec_decode" in metrics.render()
    metrics.leave_steps_out()
    assert b"spec_decode" not in metrics.render()
    assert b"time_to_first_token" in metrics.render()


remote = pytest.importorskip("foredraft.cluster.remote", reason="clusters need foredraft[ray]")


def test_a_session_stands_for_the_prompt() -> None:
    key, prompt, other = remote.affinity_key, [1, 2, 3], [4, 5, 6]
    assert key(prompt, None) != key(other, None)
    assert key(prompt, None, "a") == key(other, None, "a")
    assert key(prompt, None, "a") != key(prompt, None, "b")
    assert key(prompt, "x", "a") != key(prompt, "y", "a")
    assert key([*range(256), 1], None) == key([*range(256), 2], None)


@pytest.mark.slow
@WITH_START
def test_chats_stay_where_they_are_cached(one_node: Path) -> None:
    """Short ones too, whose first tokens are not yet 256; and by chance they do not."""
    with serving(one_node) as cluster:
        single = routing_hits(cluster.url, "beginning", 1, chats=12, clients=3, max_tokens=16)
        cluster.deploy(replicas=4)
        by = {
            way: routing_hits(cluster.url, way, 4, chats=12, clients=3, max_tokens=16)
            for way in ("beginning", "prompt_cache_key", "random")
        }
    assert single.share > 0.5
    assert by["beginning"].share >= 0.95 * single.share
    assert by["prompt_cache_key"].share >= 0.95 * single.share
    assert by["random"].share < 0.9 * single.share


CHAT = {"messages": [{"role": "user", "content": "The ferry"}], "max_tokens": 60, "seed": 11}


def keep_busy(served: Served, clients: int, until: Any) -> list[int]:
    """Status codes of chats that are asked for until ``until`` says so."""

    def one(_: int) -> list[int]:
        found = []
        with served.client() as client:
            while not until():
                found.append(client.post("/v1/chat/completions", json=CHAT).status_code)
        return found

    with ThreadPoolExecutor(clients) as pool:
        return [code for found in pool.map(one, range(clients)) for code in found]


@pytest.mark.slow
@WITH_START
def test_engines_come_with_load_and_go_without(one_node: Path) -> None:
    options = {"autoscale": (1, 2), "upscale_delay": 2.0, "downscale_delay": 4.0}
    with serving(one_node, seconds=0.02, **options) as cluster:
        assert len(actors("engine")) == 1
        codes = keep_busy(cluster, 8, lambda: len(actors("engine")) == 2)
        assert set(codes) == {200}
        wait_until(lambda: len(actors("engine")) == 1)
        assert cluster.metric("foredraft:lost_total") == 0


replica = pytest.importorskip("foredraft.cluster.replica", reason="clusters need foredraft[ray]")


def test_load_and_health(
    tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = replica.EngineReplica.__del__
    monkeypatch.delattr(replica.EngineReplica, "__del__")  # Python would call it, too
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    death = tmp_path / "death"
    load_one = partial(load, tokenizer_directory, death, 0.02)
    params = SamplingParams(max_tokens=500, seed=1, ignore_eos=True)
    asked = replica.AskedReply([1, 2, 3], params, None, 0, ReplySoFar(()))

    async def run() -> list[Any]:
        engine = replica.EngineReplica(load_one, 8)
        assert engine.record_autoscaling_stats() == {"load": 0.0}
        engine.check_health()
        items = [engine.open(asked) for _ in range(MAX_BATCH_SIZE // 2)]
        for item in items:
            assert await anext(item) is None
            await anext(item)
        assert engine.record_autoscaling_stats()["load"] >= 0.5
        assert not codes
        death.write_text("1 stops")
        ends = [[event async for event in item][-1] for item in items]
        with pytest.raises(EngineStoppedError):
            engine.check_health()
        await close(engine)
        return ends

    for end in asyncio.run(run()):
        assert isinstance(end, EngineStoppedError)
    assert set(codes) == {1}, "a stopped engine ends its process"
