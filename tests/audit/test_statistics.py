"""The audit's statistics: known values, no false alarms, and the promised power."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom, chi2

from foredraft.audit.plain import Margins
from foredraft.audit.report import Finding
from foredraft.audit.statistics import (
    Array,
    Drafted,
    LawTests,
    Sum,
    chi_square_tail,
    holm,
    share_below,
    tail_bound,
)

VOCAB = 40
ALPHA = 1e-4


@pytest.mark.parametrize("degrees", [1, 5, 19, 99])
@pytest.mark.parametrize("statistic", [0.0, 0.1, 5.0, 19.0, 40.0, 100.0, 300.0])
def test_the_chi_square_tail_is_scipys(degrees: int, statistic: float) -> None:
    due = chi2.sf(statistic, degrees)
    assert chi_square_tail(statistic, degrees) == pytest.approx(due, rel=1e-9, abs=1e-15)


def test_holm_is_that_of_the_paper() -> None:
    corrected = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert corrected == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


def test_the_share_that_none_of_many_tokens_leaves_open() -> None:
    assert share_below(3_000, 0.95) == pytest.approx(1e-3, rel=0.01)  # the rule of three
    assert share_below(0, 0.95) == 1.0


def test_a_sum_of_fair_coins_has_the_normal_tail() -> None:
    heads = Sum("heads")
    for toss in range(1_000):
        cell = 0 if toss < 540 else 1
        heads.add(cell, np.array([0.5, 0.5]), np.array([1.0, 0.0]), reach=1.0)
    assert heads.p_value == pytest.approx(math.erfc(40 / math.sqrt(250) / math.sqrt(2)))
    assert heads.shift == pytest.approx(0.04)
    assert heads.detectable(2e-3, 0.99) == pytest.approx((3.09 + 2.33) / math.sqrt(4_000), rel=0.01)


def test_too_little_says_nothing() -> None:
    rare = Sum("rare")
    for _ in range(50):
        rare.add(0, np.array([0.01, 0.99]), np.array([1.0, 0.0]), reach=1.0)
    assert rare.p_value == 1.0
    assert rare.detectable(ALPHA, 0.99) == math.inf


@pytest.mark.parametrize(("count", "chance"), [(20, 0.5), (300, 0.01), (4_000, 0.03)])
def test_the_largest_p_value_is_no_smaller_than_the_exact_one(count: int, chance: float) -> None:
    for heads in range(count + 1):
        off = heads - count * chance
        variance = count * chance * (1.0 - chance)
        bound = Sum("heads", off, variance, largest=1.0 - chance).largest_p_value
        exact = binom.sf(heads - 1, count, chance) if off > 0 else binom.cdf(heads, count, chance)
        assert bound >= min(1.0, exact)


class Source:
    """Made laws, sharp and flat, with drafts that hold in about two of three places."""

    def __init__(self, seed: int, drawn: bool) -> None:
        self._random, self._numpy = random.Random(seed), np.random.default_rng(seed)
        self._drawn = drawn
        self.noise = self._numpy.exponential(size=VOCAB)
        self.held = False  # the draft before

    def run(self, count: int, serve: Callable[[Source, Array, Array], int]) -> LawTests:
        """``count`` tokens, as ``serve`` makes them of the law and the draft."""
        tests, token = LawTests(1), 0
        for place in range(count):
            if place % 60 == 0:
                tests.begin()
            law, draft = self._laws()
            if not self._drawn:
                draft = np.eye(VOCAB)[draft.argmax()]
            last, token = token, serve(self, law, draft)
            tokens = np.flatnonzero(draft > 1e-4)
            likely = (tokens, draft[tokens]) if self._drawn else None
            tests.add(law, token, Drafted(int(draft.argmax()), likely), last)
        return tests

    def _laws(self) -> tuple[Array, Array]:
        sharpness = self._numpy.choice([1.0, 2.0, 4.0])
        logits = self._numpy.normal(size=VOCAB) * sharpness
        nearly = logits + 0.5 * self._numpy.normal(size=VOCAB)
        return softmax(logits), softmax(nearly)

    def draw(self, probs: Array) -> int:
        return int(self._numpy.choice(len(probs), p=probs / probs.sum()))

    def new_noise(self) -> None:
        self.noise = self._numpy.exponential(size=VOCAB)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability


def softmax(logits: Array) -> Array:
    weights: Array = np.exp(logits - logits.max())
    return weights / weights.sum()


def honest(source: Source, law: Array, draft: Array) -> int:
    """The ratio test."""
    token = source.draw(draft)
    if source.chance(min(1.0, law[token] / draft[token])):
        return token
    return source.draw(np.maximum(law - draft, 0.0))


def accepts_all(source: Source, law: Array, draft: Array) -> int:
    return source.draw(draft)


def accepts_typical(source: Source, law: Array, draft: Array) -> int:
    token = source.draw(draft)
    return token if law[token] >= 0.09 else honest(source, law, draft)


def forgets_the_residual(source: Source, law: Array, draft: Array) -> int:
    token = source.draw(draft)
    accepts = source.chance(min(1.0, law[token] / draft[token]))
    return token if accepts else source.draw(law)


def draws_warmer(source: Source, law: Array, draft: Array) -> int:
    return source.draw(law**0.8)


def one_in_twenty_unverified(source: Source, law: Array, draft: Array) -> int:
    return (accepts_all if source.chance(1 / 20) else honest)(source, law, draft)


def one_in_four_with_the_noise_before(source: Source, law: Array, draft: Array) -> int:
    """Each token alone is of its law."""
    if not source.chance(1 / 4):
        source.new_noise()
    return int((source.noise / law).argmin())


def bonus_drawn_colder(source: Source, law: Array, draft: Array) -> int:
    """A bonus follows a draft that held; every other token behind one is no bonus."""
    is_cold = source.held and source.chance(1 / 2)
    token = source.draw(law ** (1 / 0.7) if is_cold else law)
    source.held = token == draft.argmax()
    return token


# Of 100 audits 5 alarms are due at most, of 500 25; the bounds come once in ten thousand times.
@pytest.mark.parametrize(
    ("audits", "bound"), [(100, 15), pytest.param(500, 45, marks=pytest.mark.slow)]
)
def test_honest_tokens_raise_no_alarm(audits: int, bound: int) -> None:
    """At a large alpha no more alarms than alpha says, and none at the one in use."""
    least = [
        min(Source(seed, drawn=seed % 2 == 0).run(250, honest).p_values().values())
        for seed in range(audits)
    ]
    assert min(least) > ALPHA
    assert sum(p <= 0.05 for p in least) <= bound


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize(
    "served", [accepts_all, accepts_typical, forgets_the_residual, draws_warmer]
)
def test_lossy_rules_are_found(served: Callable[[Source, Array, Array], int], drawn: bool) -> None:
    assert Source(1, drawn).run(3_000, served).rejects(ALPHA)


def test_a_small_shift_is_found_when_the_power_for_it_is_there() -> None:
    """One token in twenty is the draft's: it would be found 99 times in 100 by its own account."""
    tests = Source(1, drawn=False).run(6_000, one_in_twenty_unverified)
    assert tests.drafted.shift == pytest.approx(0.05 * 0.45, abs=0.02)
    assert tests.detectable(ALPHA, 0.99) < 0.04
    fewer = Source(1, drawn=False).run(1_500, honest)
    assert fewer.detectable(ALPHA, 0.99) == pytest.approx(
        2 * tests.detectable(ALPHA, 0.99), rel=0.1
    )


@pytest.mark.parametrize("degrees", [3, 30])
def test_noise_alone_passes_the_tolerance_as_seldom_as_it_says(degrees: int) -> None:
    """Heavy tails and light ones; four times the largest of a few texts alarmed for one in five."""
    draw, alpha, number, times = np.random.default_rng(1).standard_t, 0.01, 5_000, 200
    alarms, before = 0, 0
    for _ in range(times):
        sample, later = abs(draw(degrees, 1_200)), abs(draw(degrees, number))
        alarms += later.max() > tail_bound(sample, number, alpha)
        before += later.max() > 4.0 * sample[:192].max()
    assert alarms <= 3 * alpha * times
    assert before > 20 or degrees == 30


def test_a_small_sample_gives_a_wide_tolerance_and_no_noise_none() -> None:
    sample = abs(np.random.default_rng(2).normal(size=1_200))
    assert 1.0 < tail_bound(sample, 10_000, 1e-4) / sample.max() < 8.0
    assert tail_bound(sample[:40], 10_000, 1e-4) > 2.0 * tail_bound(sample, 10_000, 1e-4)
    assert tail_bound([0.0] * 192, 10_000, 1e-4) == tail_bound([], 10_000, 1e-4) == 0.0
    assert tail_bound([1e-3], 10_000, 1e-4) > 1e-3


@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("size", [192, 1_152])
def test_rare_noise_gives_no_tolerance_of_many_nats(size: int, share: float) -> None:
    draw = np.random.default_rng(3)
    sample = np.where(draw.random(size) < share, draw.random(size) * 0.01, 0.0)
    assert 0.01 < tail_bound(sample, 10_000, 1e-4) < 20.0
    assert tail_bound([1.0], 10_000, 1e-4) < 1e5


def test_noise_of_several_nats_leaves_a_verdict_open() -> None:
    for tolerance, verdict in ((0.5, Finding.NEAR_TIES), (1.5, Finding.INCONCLUSIVE)):
        margins = Margins(tolerance, tokens=100)
        margins.count(0.4)
        assert margins.finding is verdict
    assert Margins(1.5, tokens=100).finding is Finding.SAME_BITS


def test_noise_that_is_used_twice_is_found_by_the_repeats_alone() -> None:
    p_values = Source(1, drawn=False).run(3_000, one_in_four_with_the_noise_before).p_values()
    assert p_values.pop("repeats") <= ALPHA
    assert min(p_values.values()) > 0.01


def test_a_colder_bonus_is_found_behind_what_held() -> None:
    p_values = Source(6, drawn=False).run(4_000, bonus_drawn_colder).p_values()
    assert p_values.pop("surprisal behind a guess that held") <= ALPHA
    assert min(p_values.values()) > 0.01, "all tokens together do not show it"


def test_an_impossible_token_is_proof() -> None:
    tests = LawTests()
    tests.add(np.array([0.5, 0.5, 0.0]), 2)
    assert tests.rejects(1e-300)
