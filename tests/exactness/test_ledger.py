"""The enumerator by hand, and that the exactness tests have teeth: each known mistake is found."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.core.choices import DrawKey, DrawnChoices
from tests.exactness.drafting import TableDrafter
from tests.exactness.engine_runs import PROMPT, generate, sample
from tests.exactness.gtest import GTest, g_test
from tests.exactness.ledger import (
    Ledger,
    LedgerChoices,
    keyed_numbers_from,
    law,
    outcomes,
    total_variation,
)
from tests.exactness.mutants import MUTANTS, Parts
from tests.exactness.worlds import Tokens, World, target_law, world

QUARTERS = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)


def test_every_path_once_with_its_weight() -> None:
    def two_then_three(ledger: Ledger) -> tuple[int, int]:
        first = ledger.decide([0.4, 0.6])
        return first, ledger.decide([1.0, 0.0, 3.0]) if first else 9

    paths = sorted(outcomes(two_then_three))
    assert [path for path, _ in paths] == [(0, 9), (1, 0), (1, 2)]
    assert [weight for _, weight in paths] == pytest.approx([0.4, 0.15, 0.45])


def test_paths_with_one_result_add_up() -> None:
    heads = law(lambda ledger: sum(ledger.decide([0.5, 0.5]) for _ in range(4)))
    assert heads == pytest.approx({k: math.comb(4, k) / 16 for k in range(5)})


def test_a_shared_number_is_not_drawn_twice() -> None:
    both = law(lambda ledger: tuple(ledger.decide([0.3, 0.7], "u") for _ in range(2)))
    assert both == pytest.approx({(0, 0): 0.3, (1, 1): 0.7})
    split = law(lambda ledger: (ledger.decide([0.3, 0.7], "u"), ledger.decide([0.5, 0.5], "u")))
    assert split == pytest.approx({(0, 0): 0.3, (1, 0): 0.2, (1, 1): 0.5})


def test_choices() -> None:
    def run(ledger: Ledger) -> tuple[int, bool]:
        choices = LedgerChoices(ledger)
        return choices.draw(QUARTERS, 0), choices.accept(0.2, 0)

    expected = {(0, True): 0.05, (0, False): 0.2, (2, True): 0.15, (2, False): 0.6}
    assert law(run) == pytest.approx(expected)


def test_keyed_choices_of_the_engine() -> None:
    def run(ledger: Ledger) -> tuple[int, int, bool]:
        with keyed_numbers_from(ledger):
            draft, verify = DrawnChoices(3, 5), DrawKey(3, 5)
            token = draft.draw(QUARTERS, 0)
            return token, draft.draw(QUARTERS, 0), verify.accept(0.5, 0)

    shared = {(t, t, a): p / 2 for t, p in ((0, 0.25), (2, 0.75)) for a in (True, False)}
    assert law(run) == pytest.approx(shared), "one key is one number, two purposes are two"


# ------------------------------------------------------------------- the exactness tests have teeth


ROUNDING = 1e-12
FOUND = 1e-5
"""A total variation that no rounding explains."""
NUM_TOKENS = 3
"""Most mistakes show in texts of two, which are a tenth of the work."""
NUM_DRAFT_TOKENS = 2
NUM_REQUESTS = 4_000
WORLDS = [world("random", 3, seed) for seed in (12, 20)]
"""A mistake need not show in every world; these two show all of them."""
ENUMERABLE = [name for name, mutant in MUTANTS.items() if mutant.enumerable]
VISIBLE = [name for name, mutant in MUTANTS.items() if mutant.visible]


def unless_enumerated(name: str) -> Any:
    """Mutants that enumeration finds every time run in `make test-all`."""
    return pytest.param(name, marks=pytest.mark.slow if name in ENUMERABLE else ())


def total_variation_of(parts: Parts, w: World, num_tokens: int = NUM_TOKENS) -> float:
    """Between the engine's exact law, with these parts, and the target's."""
    params = replace(parts.params, max_tokens=num_tokens, seed=0)
    drafter = TableDrafter(w.draft(), parts.draft)  # it keeps nothing but the tables

    def run(ledger: Ledger) -> Tokens:
        with parts.installed(), keyed_numbers_from(ledger):
            target = parts.fit(w.target())
            (result,) = generate(target, drafter, NUM_DRAFT_TOKENS, [(PROMPT, params)])
        return result.token_ids

    return total_variation(law(run), target_law(w, params, num_tokens, PROMPT))


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
    for num_tokens, w in itertools.product((2, NUM_TOKENS), WORLDS):
        distance = total_variation_of(MUTANTS[name].broken, w, num_tokens)
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
