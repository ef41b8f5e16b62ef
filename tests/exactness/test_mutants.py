"""The exactness tests have teeth: each known mistake is found, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.exactness.drafting import TableDrafter
from tests.exactness.engine_runs import PROMPT, generate, sample
from tests.exactness.gtest import GTest, g_test
from tests.exactness.ledger import Ledger, keyed_numbers_from, law, total_variation
from tests.exactness.mutants import MUTANTS, Parts
from tests.exactness.worlds import Tokens, World, target_law, world

ROUNDING = 1e-12
FOUND = 1e-5
"""A total variation that no rounding explains."""
NUM_TOKENS = 3
NUM_DRAFT_TOKENS = 2
NUM_REQUESTS = 4_000
WORLDS = [world("random", 3, seed) for seed in (12, 20)]
"""A mistake need not show in every world; these two show all of them."""
ENUMERABLE = [name for name, mutant in MUTANTS.items() if mutant.enumerable]
VISIBLE = [name for name, mutant in MUTANTS.items() if mutant.visible]


def unless_enumerated(name: str) -> Any:
    """Mutants that enumeration finds every time run in `make test-all`."""
    return pytest.param(name, marks=pytest.mark.slow if name in ENUMERABLE else ())


def total_variation_of(parts: Parts, w: World) -> float:
    """Between the engine's exact law, with these parts, and the target's."""
    params = replace(parts.params, max_tokens=NUM_TOKENS, seed=0)
    drafter = TableDrafter(w.draft(), parts.draft)  # it keeps nothing but the tables

    def run(ledger: Ledger) -> Tokens:
        with parts.installed(), keyed_numbers_from(ledger):
            target = parts.fit(w.target())
            (result,) = generate(target, drafter, NUM_DRAFT_TOKENS, [(PROMPT, params)])
        return result.token_ids

    return total_variation(law(run), target_law(w, params, NUM_TOKENS, PROMPT))


def g_test_of(parts: Parts, w: World) -> GTest:
    params = replace(parts.params, max_tokens=NUM_TOKENS)
    with parts.installed():
        drafter = TableDrafter(w.draft(), parts.draft)
        target = parts.fit(w.target())
        drawn = sample(target, drafter, NUM_DRAFT_TOKENS, params, range(NUM_REQUESTS))
    return g_test(drawn.texts, target_law(w, params, NUM_TOKENS, PROMPT))


@pytest.mark.parametrize("name", ENUMERABLE)
def test_enumeration_finds_the_mistake(name: str) -> None:
    missed: list[float] = []
    for w in WORLDS:
        distance = total_variation_of(MUTANTS[name].broken, w)
        if distance > FOUND:
            return
        missed.append(distance)
    pytest.fail(f"total variations only {missed}")


@pytest.mark.slow  # what is right is enumerated in test_engine_enumeration.py every time
@pytest.mark.parametrize("name", MUTANTS)
def test_enumeration_finds_nothing_without_the_mistake(name: str) -> None:
    distances = [total_variation_of(MUTANTS[name].sound, w) for w in WORLDS]
    assert max(distances) < ROUNDING, f"total variations {distances}"


@pytest.mark.parametrize("name", [*map(unless_enumerated, VISIBLE)])
def test_the_g_test_finds_the_mistake(name: str) -> None:
    missed: list[GTest] = []
    for w in WORLDS:
        result = g_test_of(MUTANTS[name].broken, w)
        if result.rejects:
            return
        missed.append(result)
    pytest.fail(f"not found: {'; '.join(map(str, missed))}")
