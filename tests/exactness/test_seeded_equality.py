"""Same seed, same text: with chosen drafts, speculation changes no token at any temperature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from foredraft.core.params import SamplingParams
from foredraft.drafters.base import Drafter
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.text.ngram import NgramDrafter
from tests.exactness.drafting import SHAPES, Chosen, Drawn, TableDrafter
from tests.exactness.engine_runs import generate, texts
from tests.exactness.worlds import Tokens, World, world

WORLD = world("random", 5)
PROMPTS: tuple[Tokens, ...] = ((1,), (0, 1, 2, 0, 1), (4, 3, 2, 1, 0, 4, 3, 2))
NUM_TOKENS = 30
DRAFTERS: dict[str, Callable[[World], Drafter]] = {
    "ngram": lambda w: NgramDrafter(max_ngram_size=3, min_ngram_size=1),
    "draft model": lambda w: DraftModelDrafter(w.draft()),
    "draft model that is the target": lambda w: DraftModelDrafter(w.target()),
    "chosen chain": lambda w: TableDrafter(w.draft(), Chosen(tuple(range(-1, 7)))),
    "chosen tree": lambda w: TableDrafter(w.draft(), Chosen((*SHAPES["binary of depth 2"], 2, 6))),
}


def requests(params: SamplingParams) -> list[tuple[Tokens, SamplingParams]]:
    """Three rows of different lengths and seeds."""
    return [(prompt, replace(params, seed=11 + i)) for i, prompt in enumerate(PROMPTS)]


def plain(params: SamplingParams) -> list[Tokens]:
    """Each request decoded alone, without speculation."""
    return [
        texts(generate(WORLD.target(), NoDrafter(), 0, [request]))[0]
        for request in requests(params)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_changes_no_token(name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS)
    expected = plain(params)
    num_accepted = 0
    for num_draft_tokens in range(9):
        drafter = DRAFTERS[name](WORLD)
        results = generate(WORLD.target(), drafter, num_draft_tokens, requests(params))
        assert texts(results) == expected, f"{num_draft_tokens} draft tokens"
        num_accepted += sum(result.stats.accepted for result in results)
    assert num_accepted > 50, "too little was accepted for the equality to say anything"


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.4}], ids=str)
def test_filters_change_nothing_about_it(options: dict[str, float]) -> None:
    params = SamplingParams.of(temperature=0.9, max_tokens=NUM_TOKENS, **options)
    for name in DRAFTERS:
        results = generate(WORLD.target(), DRAFTERS[name](WORLD), 4, requests(params))
        assert texts(results) == plain(params), name


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
