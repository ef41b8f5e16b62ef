"""The official client of OpenAI's interface, while engines die under it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import WITH_START, serving

openai = pytest.importorskip("openai", reason="pip install openai")
pytestmark = [pytest.mark.slow, WITH_START]

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "temperature": 1.0, "stream": True}


def text_of(client: Any, seed: int) -> str:
    """A streamed reply; it must come to its end."""
    messages = [{"role": "user", "content": f"{seed} ferries"}]
    text, reasons = "", []
    for chunk in client.chat.completions.create(messages=messages, seed=seed, **ASKED):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] in ("length", "stop")
    return text


def test_streams_are_whole_while_engines_die(one_node: Path) -> None:
    with serving(one_node, seconds=0.02, replicas=2) as cluster:
        urls = cluster.url, str(cluster.single.base_url)
        clients = [
            openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", max_retries=0)
            for url in urls
        ]
        for kill in range(6):
            expected = text_of(clients[1], kill)
            cluster.kill_after(random.Random(kill).randrange(1, 12))
            assert text_of(clients[0], kill) == expected
            assert not cluster.death.exists()
        assert cluster.metric("foredraft:resumed_total") >= 6
        assert cluster.metric("foredraft:lost_total") == 0
