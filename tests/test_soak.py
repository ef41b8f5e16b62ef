"""The soak test itself, for two seconds; `python -m tests.soak` runs it for ten minutes."""

from __future__ import annotations

import asyncio

from tests.soak import Soak, soak, table_llm


def test_everybody_is_served_and_nothing_is_left() -> None:
    run = asyncio.run(soak(table_llm(), 2.0))
    for name in ("length", "hung up", "refused"):
        assert run.seen[name] > 0, name


def test_growth_is_seen() -> None:
    async def grown(memory: list[int]) -> float:
        run = Soak(None, 1.0, 1)  # type: ignore[arg-type]
        run.memory = memory
        return run.growth

    flat, rising = [900 << 20] * 30, [(900 + 5 * i) << 20 for i in range(30)]
    assert asyncio.run(grown(flat)) == 0.0
    assert asyncio.run(grown(rising)) > 0.02
