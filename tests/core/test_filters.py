"""The filters, compiled and in numpy: which tokens they leave, and draws among those."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.core import draws, sampling
from foredraft.core.choices import DrawKey
from foredraft.core.noise import gumbel_argmax
from foredraft.core.params import SamplingParams
from foredraft.core.sampling import Law, law_of

Array = np.ndarray[Any, Any]
SIZES = (1, 2, 7, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 49_152)

FILTERS = [
    dict(zip(("top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0, 1, 5, 300), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.02, 1.0))
] + [{"top_p": 1 - 2**-53}, {"min_p": 1e-50}, {"min_p": 1e-40, "top_k": 3}, {"top_k": 1 << 80}]


def rows(size: int) -> Iterator[Array]:
    """float32 logits of many kinds."""
    random = np.random.default_rng(size)
    yield random.normal(3, 2.5, size)
    peaked = random.normal(0, 1, size)
    peaked[size // 3] = 30.0
    yield peaked
    yield np.zeros(size)
    yield random.integers(0, 3, size) * 1.0  # ties
    yield random.normal(20, 1e-6, size)  # nearly flat, in steps of the dtype
    yield -np.sort(random.exponential(size=size)) * 3  # ascending, none positive
    few = np.where(random.random(size) < 0.1, random.normal(0, 4, size), -math.inf)
    few[size // 2] = 1.0
    yield few
    alone = np.full(size, -math.inf)
    alone[-1] = -5.0
    yield alone
    yield (1.0 - np.arange(size) % 70 / 34.5) * 3e38  # differences overflow
    yield random.normal(0, 1e4, size)
    yield random.integers(0, 3, size) * 1e-45  # denormals


def in_numpy(logits_V: Tensor, params: SamplingParams) -> Law:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "library", lambda: None)
        return law_of(logits_V, params)


def kept(law: Law) -> Array:
    return np.asarray(law.logits_V > -math.inf)


def is_within_rounding(logits_V: Array, one: Law, other: Law, params: SamplingParams) -> bool:
    """Whether a threshold falls between two laws by less than float32 says.

    Where the weights of tokens that only one has equal those that both have, or are nothing, or
    the mass without them is just what was asked for, or they have just the share asked for.
    """
    wide_V = logits_V.astype(np.float64)
    if 0 < params.top_k < len(wide_V):
        wide_V[wide_V < np.sort(wide_V)[-params.top_k]] = -math.inf
    weights_V = np.exp((wide_V - wide_V.max()) / params.temperature)
    both_V, differ_V = kept(one) & kept(other), kept(one) != kept(other)
    differing = weights_V[differ_V]
    share = weights_V[both_V].sum() / weights_V.sum()
    return bool(
        weights_V[both_V].min() / differing.min() < 1 + 2e-6
        or differing.max() < 1e-35
        or abs(share - params.top_p) < 1e-6
        or max(abs(differing - params.min_p)) < 1e-6 * params.min_p
    )


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if draws.library() is None:
        pytest.skip("no compiled half here")


@pytest.mark.parametrize("size", SIZES)
def test_compiled_and_numpy_leave_the_same_tokens(size: int) -> None:
    """But for what lies within rounding of a threshold; what they leave is cut at a logit."""
    for wide_V, filters in itertools.product(rows(size), FILTERS if size < 1000 else FILTERS[::5]):
        logits_V = wide_V.astype(np.float32)
        for temperature in (1.0, 0.3, 1e-3, 1e-45, 40.0):
            params = SamplingParams(temperature=temperature, **filters)
            law = law_of(torch.from_numpy(logits_V), params)
            expected = in_numpy(torch.from_numpy(logits_V), params)
            assert (law.token, law.scale) == (expected.token, expected.scale)
            assert kept(law)[law.token]
            assert (kept(law) == (np.isfinite(logits_V) & (logits_V >= law.cut))).all()
            if law.cut != expected.cut:
                assert is_within_rounding(logits_V, law, expected, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.55}, {"min_p": 0.4}])
def test_ties_at_the_cut_are_kept_wherever_they_stand(
    filters: dict[str, Any], dtype: torch.dtype
) -> None:
    tail = 0.45 * 0.4 if "min_p" in filters else 0.2
    for places in itertools.combinations(range(0, 130, 13), 3):
        logits_V = torch.full((130,), math.log(1e-9), dtype=dtype)
        logits_V[1] = math.log(0.45 if "min_p" in filters else 0.4)
        logits_V[list(places)] = math.log(tail) + 1e-3
        law = law_of(logits_V, SamplingParams(temperature=1.0, **filters))
        assert np.flatnonzero(kept(law)).tolist() == sorted((1, *places))


def test_a_filter_beside_another_works_on_what_that_left() -> None:
    """Of ten equal tokens and many small ones top-k takes half of the mass away."""
    logits_V = torch.full((1000,), math.log(1e-3))
    logits_V[:10] = math.log(0.1) + torch.arange(10) * 1e-3
    alone = law_of(logits_V, SamplingParams(temperature=1.0, top_p=0.5))
    after = law_of(logits_V, SamplingParams(temperature=1.0, top_p=0.5, top_k=10))
    assert (kept(alone).sum(), kept(after).sum()) == (10, 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_anywhere(bad: float) -> None:
    for place in (0, 17, 255, 256, 299):
        logits_V = torch.zeros(300)
        logits_V[place] = bad
        for temperature in (0.0, 1.0):
            with pytest.raises(sampling.NonFiniteScoresError, match=str(bad)):
                law_of(logits_V, SamplingParams(temperature=temperature, top_p=0.9))


def test_strided_logits_go_the_same_way() -> None:
    wide_VN = torch.randn(700, 3, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01)
    for n in range(3):
        strided, whole = law_of(wide_VN[:, n], params), law_of(wide_VN[:, n].contiguous(), params)
        assert (strided.token, strided.cut) == (whole.token, whole.cut)
        assert DrawKey(1, 2).draw_target(strided, 3) == gumbel_argmax(whole.logits_V, 1, 5, 1 / 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 64, 255, 257, 5000])
def test_a_draw_above_a_cut_is_one_of_the_filtered_logits(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, wide_V in enumerate(rows(size)):
        logits_V = torch.from_numpy(wide_V.astype(np.float32)).to(dtype)
        for filters in FILTERS[::7]:
            law = law_of(logits_V, SamplingParams(temperature=0.7, **filters))
            choices = DrawKey(size, i)
            drawn = [choices.draw_target(law, depth) for depth in range(6)]
            assert law.scale is not None
            key = [(size, i + depth, law.scale) for depth in range(6)]
            assert drawn == [gumbel_argmax(law.logits_V, *one) for one in key]
            with monkeypatch.context() as patch:
                patch.setattr(draws, "library", lambda: None)
                assert drawn == [choices.draw_target(law, depth) for depth in range(6)]
