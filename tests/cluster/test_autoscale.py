"""The number of engines follows the load that they report."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Served, actors, serving, wait_until

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
@pytest.mark.timeout(300)
def test_engines_come_with_load_and_go_without(one_node: Path) -> None:
    options = {"autoscale": (1, 2), "upscale_delay": 2.0, "downscale_delay": 4.0}
    with serving(one_node, seconds=0.02, **options) as cluster:
        assert len(actors("engine")) == 1
        codes = keep_busy(cluster, 8, lambda: len(actors("engine")) == 2)
        assert set(codes) == {200}
        wait_until(lambda: len(actors("engine")) == 1)
        assert cluster.metric("foredraft:lost_total") == 0
