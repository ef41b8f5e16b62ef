"""The noise: its bits, its law, what is skipped could not have won; and rows drawn together."""

from __future__ import annotations

import itertools
import math
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core import draws as native
from foredraft.core import noise
from foredraft.core.noise import (
    gumbel_argmax,
    gumbel_noise,
    gumbel_top,
    gumbel_top_rows,
)
from foredraft.core.rng import Purpose, philox4x32
from foredraft.core.sampling import draw_rows
from foredraft.kernels import build
from tests.exactness.gtest import g_test

Array = np.ndarray[Any, Any]
SIZES = [*range(1, 71), 255, 256, 257, 1000, 49_152]


both = pytest.mark.usefixtures("path")


@pytest.fixture
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call something without the compiled half."""
    if native.library() is None:
        pytest.skip("no compiled half here")

    def call(function: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            return function(*args)

    return call


def rows(size: int) -> Iterator[Array]:
    """Logits of many kinds."""
    random = np.random.default_rng(size)
    wide = random.normal(0, 4, size).astype(np.float32)
    yield wide
    yield wide.astype(np.float64) / 3
    yield np.zeros(size, np.float32)
    yield (wide * 2500).astype(np.float32)  # a spread of some 1e4
    yield (random.integers(0, 3, size) * 1e-45).astype(np.float32)  # denormals
    yield random.integers(0, 3, size).astype(np.float64)  # ties
    few = np.where(random.random(size) < 0.1, wide, np.float32(-math.inf))
    few[size // 2] = 1.0
    yield few
    yield (1.0 - np.arange(size) % 70 / 34.5) * 1e308  # differences overflow


def by_definition(logits_V: Array, count: int, seed: int, position: int, scale: float) -> Any:
    """All scores, sorted."""
    with np.errstate(over="ignore"):
        score_V = (logits_V.astype(np.float64) - float(logits_V.max())) * scale
    score_V = score_V + gumbel_noise(range(len(logits_V)), seed, position)
    order = np.lexsort((np.arange(len(score_V)), -score_V))[:count]
    return [(int(v), float(score_V[v])) for v in order if score_V[v] > -math.inf]


# ---- bits ---------------------------------------------------------------------------------------


@both
def test_the_noise_is_what_the_file_says() -> None:
    """Token by token, with `rng.philox4x32` and the logarithm of the standard library."""
    seed, position = 0x0123456789ABCDEF, 0xFEDCBA9876543210
    tokens = [*range(600), 49_151, 2**20 + 77, 2**31 - 1]
    for v, g in zip(tokens, gumbel_noise(tokens, seed, position), strict=True):
        key, low, high = (seed & 0xFFFFFFFF, seed >> 32), position & 0xFFFFFFFF, position >> 32
        block = philox4x32((low, high, Purpose.TARGET, 16 * (v >> 8) + ((v >> 2) & 15)), key)
        fine = philox4x32((low, high, Purpose.TARGET, 2**31 + v), key)
        byte = block[(v >> 6) & 3].to_bytes(4, "little")[v & 3]
        r = byte << 44 | fine[0] << 12 | fine[1] >> 20
        u = 1.0 - (2 * r + 1) * 2.0**-53
        assert 0.0 < u < 1.0
        assert g == pytest.approx(-math.log(-math.log(u)), rel=1e-14, abs=1e-14)


def test_compiled_and_numpy_give_the_same_bits(in_numpy: Callable[..., Any]) -> None:
    """Of two million values."""
    tokens = range(100_000)
    for i in range(20):
        key = (0x9E3779B97F4A7C15 * i % 2**64, i << 29)
        assert gumbel_noise(tokens, *key) == in_numpy(gumbel_noise, tokens, *key)


SCALES = (1.0, 1 / 0.3, 1 / 1.7, 1e-6, 1e9, 1e308)


@pytest.mark.parametrize("size", SIZES)
def test_all_ways_agree(size: int, in_numpy: Callable[..., Any]) -> None:
    """Compiled, numpy and the definition: the same tokens and the same bits of their scores."""
    for (position, logits_V), scale in itertools.product(enumerate(rows(size)), SCALES):
        for count in (1, 5, 300):
            key = (count, size, position, scale)
            best = gumbel_top(logits_V, *key)
            assert best == in_numpy(gumbel_top, logits_V, *key)
            if size < 1000 or count == 5:
                assert best == by_definition(logits_V, *key)
            if count == 1:
                assert gumbel_argmax(logits_V, *key[1:]) == best[0][0]


@both
def test_a_strided_row_and_one_with_a_gradient_are_read_rightly() -> None:
    logits_NV = torch.randn(300, 2, generator=torch.Generator().manual_seed(4))
    right = gumbel_top(logits_NV[:, 1].contiguous(), 9, 1, 2)
    assert gumbel_top(logits_NV[:, 1], 9, 1, 2) == right
    assert gumbel_top(logits_NV[:, 1].clone().requires_grad_(), 9, 1, 2) == right


def exact_log(x: float) -> Decimal:
    with localcontext() as context:
        context.prec = 50
        return Decimal(x).ln()


def test_the_logarithm_is_within_one_unit_in_the_last_place() -> None:
    random = np.random.default_rng(0)
    near_one = 1.0 - np.ldexp(random.random(1500), -random.integers(0, 53, 1500))
    edges = [2.0**-53, 1 - 2.0**-53, math.sqrt(0.5), math.nextafter(math.sqrt(0.5), 0), 36.7368]
    x_M = np.array([*near_one[near_one < 1], *(random.random(500) * 37), *edges])
    for x, ours in zip(x_M.tolist(), noise._log(x_M).tolist(), strict=True):
        assert abs(Decimal(ours) - exact_log(x)) <= Decimal(math.ulp(ours)), x
    assert noise._log(np.ones(1))[0] == 0.0


# ---- what can be asked for ----------------------------------------------------------------------


@both
def test_a_token_that_cannot_occur_is_never_returned() -> None:
    logits_V = torch.full((600,), -math.inf)
    logits_V[[3, 599]] = torch.tensor([0.0, -50.0])
    for position in range(50):
        assert [v for v, _ in gumbel_top(logits_V, 10, 1, position)] == [3, 599]
        assert gumbel_argmax(logits_V, 1, position, 100.0) == 3


@both
def test_of_equal_scores_the_smallest_token_is_best() -> None:
    """Noise drowns in scores of 1e20, so those of a small difference are equal."""
    logits_V = np.zeros(700)
    logits_V[[0, 17, 300, 301, 699]] = 1e20, 1e3, -1e3, 2e3, 1e3
    tokens = [v for v, _ in gumbel_top(logits_V, 6, 5, 6, 1.0)]
    assert tokens == [0, *range(1, 6)]
    scores = [s for _, s in gumbel_top(logits_V, 700, 5, 6, 1.0)]
    assert scores[1:] == [-1e20] * 699


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 299, None])
def test_rows_without_a_finite_largest_logit_are_refused(bad: float, place: int | None) -> None:
    logits_V = torch.zeros(300) if place is not None else torch.full((300,), bad)
    if place is not None:
        logits_V[place] = bad
    if bad == -math.inf and place is not None:
        assert gumbel_argmax(logits_V, 0, 0) != place
        return
    with pytest.raises(
        ValueError, match=r"the largest of 300 logits is (nan|inf|-inf), not finite"
    ):
        gumbel_argmax(logits_V, 0, 0)


@both
@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((torch.zeros(3), -1, 0), "seed is -1"),
        ((torch.zeros(3), 2**64, 0), "seed is 18446744073709551616"),
        ((torch.zeros(3), 0, -1), "position is -1"),
        ((torch.zeros(3), 0, 0, 0.0), "scale is 0.0"),
        ((torch.zeros(3), 0, 0, math.inf), "scale is inf"),
        ((torch.zeros(3), 0, 0, math.nan), "scale is nan"),
        ((torch.zeros(0), 0, 0), "V > 0"),
        ((torch.zeros(2, 2), 0, 0), "got"),
    ],
)
def test_what_is_out_of_range_is_said(args: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        gumbel_argmax(*args)


@both
def test_other_mistakes_are_said_too() -> None:
    with pytest.raises(TypeError, match="logits are float16; convert them"):
        gumbel_argmax(torch.zeros(3, dtype=torch.float16), 0, 0)
    with pytest.raises(ValueError, match="count is 0"):
        gumbel_top(torch.zeros(3), 0, 0, 0)
    with pytest.raises(ValueError, match="2 rows of logits, but 1 seeds"):
        gumbel_top_rows(torch.zeros(2, 3), 1, [0], [0], [1.0])
    with pytest.raises(ValueError, match="tokens must be in"):
        gumbel_noise([-1], 0, 0)
    assert gumbel_noise([], 0, 0) == []


# ---- the law ------------------------------------------------------------------------------------


def draws(logits: Array, count: int, scale: float = 1.0, by: str = "position") -> Counter[int]:
    """Tokens drawn at many positions of one seed, or with many seeds at one position."""
    found = Counter[int]()
    for start in range(0, count, 1000):
        turns, fixed = range(start, start + 1000), [11] * 1000
        seeds, positions = (fixed, turns) if by == "position" else (turns, fixed)
        rows_NV = np.broadcast_to(logits, (1000, len(logits)))
        found.update(
            row[0][0] for row in gumbel_top_rows(rows_NV, 1, seeds, positions, [scale] * 1000)
        )
    return found


def softmax(logits_V: Array, scale: float = 1.0) -> Array:
    weight_V = np.exp((logits_V - logits_V.max()) * scale)
    return np.asarray(weight_V / weight_V.sum())


@pytest.mark.parametrize("scale", [1.0, 0.4, 2.5])
@pytest.mark.parametrize("by", ["position", "seed"])
def test_the_draw_has_the_law_of_the_softmax(by: str, scale: float) -> None:
    logits_V = np.log([0.5, 0.3, 0.15, 0.04, 0.01])
    law = dict(enumerate(softmax(logits_V, scale).tolist()))
    result = g_test(draws(logits_V, 40_000, scale, by), law)
    assert not result.rejects, result


@pytest.mark.parametrize("step", [(0, 1), (0, 2), (0, 256), (1, 0), (2, 0)])
def test_neighbouring_keys_are_independent(step: tuple[int, int]) -> None:
    """A key that is used again at the next position, say, would show."""
    p = [0.4, 0.3, 0.2, 0.1]
    logits_V, count = np.log(p), 20_000
    seeds = np.array([5 + 7 * i for i in range(count)])
    positions = np.array([3 * i for i in range(count)])
    rows_NV = np.broadcast_to(logits_V, (count, 4))
    first, second = (
        gumbel_top_rows(rows_NV, 1, (seeds + s).tolist(), (positions + t).tolist(), [1.0] * count)
        for s, t in ((0, 0), step)
    )
    pairs = Counter((a[0][0], b[0][0]) for a, b in zip(first, second, strict=True))
    law = {(a, b): p[a] * p[b] for a, b in itertools.product(range(4), repeat=2)}
    result = g_test(pairs, law)
    assert not result.rejects, result


def test_tokens_of_one_position_are_independent() -> None:
    """Also those that share a word, a block, or are 256 apart."""
    noise_PV = np.array([gumbel_noise(range(600), 1, t) for t in range(4000)])
    w_PV = np.exp(-np.exp(-noise_PV)) - 0.5  # uniform
    for other in (1, 2, 3, 4, 16, 64, 255, 256, 512):
        assert abs((w_PV[:, 0] * w_PV[:, other]).mean()) < 5 / 12 / math.sqrt(4000)
    assert abs(w_PV.mean()) < 5 * math.sqrt(1 / 12 / w_PV.size)
    assert abs((w_PV**2).mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / w_PV.size)


def test_the_best_are_draws_without_replacement() -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    count = 30_000
    rows_NV = np.broadcast_to(np.log(p), (count, 4))
    best = gumbel_top_rows(rows_NV, 2, [3] * count, range(count), [1.0] * count)
    pairs = Counter((row[0][0], row[1][0]) for row in best)
    law = {(a, b): p[a] * p[b] / (1 - p[a]) for a, b in itertools.permutations(range(4), 2)}
    result = g_test(pairs, law)
    assert not result.rejects, result


def acceptance(p: list[float], q: list[float]) -> float:
    """How often both choose the same token: Daliri et al., arXiv 2408.07978."""
    each = range(len(p))
    return math.fsum(
        1 / math.fsum(max(p[y] / p[x], q[y] / q[x]) for y in each) for x in each if p[x] and q[x]
    )


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
        ([0.6, 0.2, 0.1, 0.1], [0.5, 0.1, 0.1, 0.3]),
        ([0.9, 0.05, 0.05], [0.1, 0.8, 0.1]),
        ([0.7, 0.0, 0.3], [0.5, 0.25, 0.25]),
    ],
)
def test_a_draft_with_the_same_noise_is_accepted_as_often_as_the_paper_says(
    p: list[float], q: list[float]
) -> None:
    count = 30_000
    key = ([1] * count, range(count), [1.0] * count)
    with np.errstate(divide="ignore"):
        target, draft = (
            gumbel_top_rows(np.broadcast_to(np.log(law), (count, len(law))), 1, *key)
            for law in (p, q)
        )
    equal = sum(a[0][0] == b[0][0] for a, b in zip(target, draft, strict=True))
    due = acceptance(p, q)
    overlap = sum(map(min, p, q))
    assert overlap / (2 - overlap) <= due <= overlap
    assert abs(equal / count - due) < 5 * math.sqrt(due * (1 - due) / count)


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40), st.integers(0, 2**64 - 1))
def test_a_filter_before_changes_nothing_for_what_it_keeps(logits: list[float], seed: int) -> None:
    """The winner of the whole row wins wherever it is kept."""
    logits_V = np.array(logits)
    winner = gumbel_argmax(logits_V, seed, 3)
    kept_V = np.where(np.arange(len(logits)) % 2 == winner % 2, logits_V, -math.inf)
    kept_V[winner] = logits_V[winner]
    kept_V[int(logits_V.argmax())] = logits_V.max()  # the sums stay relative to the same logit
    assert gumbel_argmax(kept_V, seed, 3) == winner


def test_nothing_is_compiled_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str = "decoder") -> None:
        pytest.fail(f"{name} is loaded")

    monkeypatch.setattr(build, "load_library", refuse)
    assert runpy.run_path(str(noise.__file__))["gumbel_argmax"]


# ------------------------------------------------------------------------------ rows drawn together


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab", [1, 7, 255, 256, 257, 1000])
def test_rows_drawn_together_are_drawn_as_each_alone(dtype: Any, vocab: int) -> None:
    """Also where the likeliest token is taken, and where rows are left out."""
    generator = np.random.default_rng(vocab)
    logits_NV = generator.normal(0.0, 3.0, (6, vocab)).astype(dtype)
    logits_NV[2] = 1.0  # of equal ones the first
    rows = [
        *((4, (3, 0, 1.0)), (0, (1 << 63, 17, 0.0))),
        *((2, (0, 1 << 40, 1.7)), (5, (9, 5, 0.0))),
    ]
    draws = draw_rows(torch.from_numpy(logits_NV), rows)
    if None in draws:
        pytest.skip("there is no compiler here")
    for draw, (row, (seed, position, scale)) in zip(draws, rows, strict=True):
        assert draw is not None
        logits_V = logits_NV[row]
        assert draw.token == int(logits_V.argmax())
        alone = gumbel_argmax(logits_V, seed, position, scale) if scale else draw.token
        assert (draw.drawn, draw.scale) == (alone, scale or None)
        assert torch.equal(draw.given_V, torch.from_numpy(logits_V))


def test_rows_that_are_not_finite_are_left_to_others() -> None:
    logits_NV = np.zeros((4, 300), np.float32)
    logits_NV[1, 5], logits_NV[2, 7], logits_NV[3] = np.nan, np.inf, -np.inf
    draws = draw_rows(torch.from_numpy(logits_NV), [(i, (0, 0, 1.0 * (i < 3))) for i in range(4)])
    assert draws[1:] == [None, None, None]
