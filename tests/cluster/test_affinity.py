"""Routing of requests to engines, and the cached part of a chat there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.affinity import routing_hits
from tests.cluster.conftest import serving

remote = pytest.importorskip("foredraft.cluster.remote", reason="clusters need foredraft[ray]")


def test_a_session_stands_for_the_prompt() -> None:
    key, prompt, other = remote.affinity_key, [1, 2, 3], [4, 5, 6]
    assert key(prompt, None) != key(other, None)
    assert key(prompt, None, "a") == key(other, None, "a")
    assert key(prompt, None, "a") != key(prompt, None, "b")
    assert key(prompt, "x", "a") != key(prompt, "y", "a")
    assert key([*range(256), 1], None) == key([*range(256), 2], None)


@pytest.mark.slow
@pytest.mark.timeout(300)
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
