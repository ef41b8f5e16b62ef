"""Drawn drafts: a seed is enough to repeat a text, whatever the batch; see test_seeded_fuzz.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.core.params import SamplingParams
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.none import NoDrafter
from tests.exactness.drafting import SHAPES, Drawn, TableDrafter
from tests.exactness.engine_runs import generate, texts
from tests.exactness.worlds import Tokens, world

WORLD = world("random", 5)
PROMPTS: tuple[Tokens, ...] = ((1,), (0, 1, 2, 0, 1), (4, 3, 2, 1, 0, 4, 3, 2))
NUM_TOKENS = 30


def requests(params: SamplingParams) -> list[tuple[Tokens, SamplingParams]]:
    """Three rows of different lengths and seeds."""
    return [(prompt, replace(params, seed=11 + i)) for i, prompt in enumerate(PROMPTS)]


def plain(params: SamplingParams) -> list[Tokens]:
    """Each request decoded alone, without speculation."""
    return [
        texts(generate(WORLD.target(), NoDrafter(), 0, [request]))[0]
        for request in requests(params)
    ]


@pytest.mark.parametrize("max_batch_size", [1, 2])
def test_drawn_texts_do_not_depend_on_the_batch(max_batch_size: int) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, coupling="drawn")

    def run(rows: int) -> list[Tokens]:
        drafter = TableDrafter(WORLD.draft(), Drawn(SHAPES["unbalanced"], replacement=False))
        return texts(generate(WORLD.target(), drafter, 4, requests(params), rows))

    assert run(max_batch_size) == run(3)


def test_a_seed_is_enough_to_repeat_a_drawn_text() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, coupling="drawn")
    once, again = (
        texts(generate(WORLD.target(), DraftModelDrafter(WORLD.draft()), 3, requests(params)))
        for _ in range(2)
    )
    assert once == again
    assert once != plain(params), "drawn drafts take other numbers, so the text is another"
