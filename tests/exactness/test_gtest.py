"""The engine with its real random numbers, against the target's law, by G-tests.

Enumeration proves the rules for any uniform numbers; this shows that the keyed numbers are good
enough and that nothing between the rules and a finished request bends the law. Seeds are fixed, so
a test that passes once passes always.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from foredraft.core.params import SamplingParams
from foredraft.drafters.base import Drafter
from foredraft.drafters.growth import GrowthLimits
from foredraft.drafters.model.draft_model import DraftModelDrafter, DraftTreeDrafter
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.text.ngram import NgramDrafter
from tests.exactness.drafting import SHAPES, Chosen, Draft, Drawn, TableDrafter
from tests.exactness.engine_runs import PROMPT, sample
from tests.exactness.gtest import ALPHA, g_test
from tests.exactness.worlds import World, target_law, world

DRAWN = SamplingParams(temperature=1.0, max_tokens=4, coupling="drawn")
FILTERED = SamplingParams(
    temperature=1.3, top_k=4, top_p=0.9, min_p=0.05, max_tokens=4, coupling="drawn"
)
SEEDED = SamplingParams(temperature=1.0, max_tokens=4)


@dataclass(frozen=True)
class Setup:
    """What to sample.

    Attributes:
        drafter: makes the drafter of a world.
        kind: the kind of world.
        num_draft_tokens: the budget of nodes a step.
    """

    drafter: Callable[[World], Drafter]
    kind: str = "random"
    num_draft_tokens: int = 3
    params: SamplingParams = DRAWN


def from_table(draft: Draft) -> Callable[[World], Drafter]:
    return lambda w: TableDrafter(w.draft(), draft)


def draft_model(w: World) -> Drafter:
    return DraftModelDrafter(w.draft())


def draft_tree(w: World) -> Drafter:
    return DraftTreeDrafter(w.draft(), GrowthLimits(2, 2, 2, round_cost=0.0))


SETUPS = {
    "plain": Setup(lambda w: NoDrafter(), num_draft_tokens=0),
    "n-gram": Setup(lambda w: NgramDrafter(2, 1), params=SEEDED),
    "draft model, seeded": Setup(draft_model, params=SEEDED),
    "draft model, drawn": Setup(draft_model),
    "draft model, drawn, filtered": Setup(draft_model, params=FILTERED),
    "draft model, zeros": Setup(draft_model, kind="zeros in both"),
    "draft tree, seeded": Setup(draft_tree, num_draft_tokens=6, params=SEEDED),
    "draft tree, drawn, filtered": Setup(draft_tree, num_draft_tokens=6, params=FILTERED),
    "chosen tree": Setup(from_table(Chosen(SHAPES["binary of depth 2"])), num_draft_tokens=6),
    "chain of 3": Setup(from_table(Drawn(SHAPES["chain of 3"]))),
    "star": Setup(from_table(Drawn(SHAPES["star of 3"]))),
    "star, no replacement": Setup(from_table(Drawn(SHAPES["star of 3"], replacement=False))),
    "tree": Setup(from_table(Drawn(SHAPES["unbalanced"])), num_draft_tokens=4),
    "tree, no replacement": Setup(
        from_table(Drawn(SHAPES["unbalanced, late"], replacement=False)), num_draft_tokens=4
    ),
    "tree, no replacement, zeros": Setup(
        from_table(Drawn(SHAPES["siblings far apart"], replacement=False)),
        kind="zeros in both",
        num_draft_tokens=4,
    ),
}
FEW, MANY = range(6_000), range(6_000, 36_000)
"""Seeds of each set-up: of all of them 1,080,000 rows are verified in the long run."""


def assert_law_is_kept(setup: Setup, seeds: range) -> None:
    w = world(setup.kind, vocab_size=4)
    drawn = sample(w.target(), setup.drafter(w), setup.num_draft_tokens, setup.params, seeds)
    result = g_test(drawn.texts, target_law(w, setup.params, setup.params.max_tokens, PROMPT))
    assert not result.rejects, f"{result}, {drawn.num_verified} rows verified"


_QUICK = ("plain", "chosen tree", "chain of 3", "star", "tree, no replacement, zeros")


def unless_shown_elsewhere(name: str) -> Any:
    """One of each rule; the others are left to `make test-all`.

    Drafts for seeded requests have the plain run's texts, which the conformance of each drafter
    shows every time. The law of all others is enumerated every time (test_engine_enumeration.py),
    and which numbers a rule uses depends on neither the drafter nor a filter.
    """
    return pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", [*map(unless_shown_elsewhere, SETUPS)])
def test_the_engine_keeps_the_law(name: str) -> None:
    assert_law_is_kept(SETUPS[name], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_the_engine_keeps_the_law_over_a_million_samples(name: str) -> None:
    assert_law_is_kept(SETUPS[name], MANY)


LAW: dict[str, float] = {"a": 0.5, "b": 0.3, "c": 0.2}


def counts_of(law: dict[str, float], num_samples: int, seed: int = 0) -> Counter[str]:
    generator = random.Random(seed)
    return Counter(generator.choices(list(law), list(law.values()), k=num_samples))


def test_the_statistic_by_hand() -> None:
    # 2 (60 ln(60/50) + 25 ln(25/30) + 15 ln(15/20)), and chi-squared at 2 degrees is exp(-G/2).
    result = g_test(Counter({"a": 60, "b": 25, "c": 15}), LAW)
    assert result.dof == 2
    assert result.statistic == pytest.approx(4.13205, abs=1e-5)
    assert result.p_value == pytest.approx(math.exp(-result.statistic / 2))


def test_right_counts_are_seldom_unlikely() -> None:
    """p-values of correct counts are uniform: about one in ten is below a tenth."""
    p_values = [g_test(counts_of(LAW, 500, seed), LAW).p_value for seed in range(400)]
    assert 20 <= sum(p < 0.1 for p in p_values) <= 60
    assert min(p_values) > ALPHA
