"""Times that clients see: the first token counts from a request's arrival."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from foredraft.llm import LLM
from tests.server.conftest import running


def test_the_first_token_counts_from_the_arrival_of_the_request(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template, a tokenizer or a grammar that takes long is not left out."""
    with running(load) as server, server.client() as client:
        tokenizer = server.context.tokenizer
        encode = tokenizer.encode_chat

        def slowly(*given: Any) -> list[int]:
            time.sleep(0.3)
            return encode(*given)

        monkeypatch.setattr(tokenizer, "encode_chat", slowly)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        client.post("/v1/chat/completions", json=body)
        lines = client.get("/metrics").text.splitlines()
    sums = [line for line in lines if line.startswith("foredraft:time_to_first_token_seconds_sum")]
    assert float(sums[0].split()[-1]) > 0.3
