"""Reports of an engine to Ray Serve, without a cluster."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import EngineStoppedError
from foredraft.core.params import SamplingParams
from foredraft.engine.request import ReplySoFar
from tests.cluster.models import MAX_BATCH_SIZE, load

replica = pytest.importorskip("foredraft.cluster.replica", reason="clusters need foredraft[ray]")


def test_load_and_health(
    tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = replica.EngineReplica.__del__
    monkeypatch.delattr(replica.EngineReplica, "__del__")  # Python would call it, too
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
            assert isinstance(await anext(item), str)
            await anext(item)
        assert engine.record_autoscaling_stats()["load"] >= 0.5
        death.write_text("1 stops")
        ends = [[event async for event in item][-1] for item in items]
        with pytest.raises(EngineStoppedError):
            engine.check_health()
        await close(engine)
        return ends

    for end in asyncio.run(run()):
        assert isinstance(end, EngineStoppedError)
