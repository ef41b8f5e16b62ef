"""The bench that loads a server with clients of whom some misbehave."""

from __future__ import annotations

import asyncio

from benchmarks.serve_load import run_load
from benchmarks.server_process import ServerProcess
from tests.server.conftest import Running


def test_clients_read_leave_and_are_malformed(shared: Running) -> None:
    result = asyncio.run(run_load(ServerProcess(shared.url), streams=6, seconds=0.3, seed=1))
    assert not result.faults
    assert result.is_idle
    assert result.outcomes["reads: complete"] > 0
    assert result.outcomes["malformed: 400"] > 0
    assert result.tokens > 0
