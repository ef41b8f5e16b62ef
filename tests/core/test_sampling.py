"""From logits to the distribution asked for, and from a distribution to a token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.core.logprobs import TokenLogprobs
from foredraft.core.params import SamplingParams
from foredraft.core.sampling import draw_token, largest, law_of
from tests.core.reference import logits_to_probs, reference_probs

LAST_UNIFORM = 1 - 2**-53
"""The largest number below one that a double with 53 random bits can be."""


def probs_of(logits: list[float], dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    params = SamplingParams(**{"temperature": 1.0, **options})
    return logits_to_probs(torch.tensor(logits, dtype=dtype), params)


# Quarters make ties common, and never make two different logits almost equal.
LOGITS = st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=1, max_size=9)
TEMPERATURES = st.sampled_from([0.0, 0.05, 0.5, 1.0, 1.7, 30.0])


@given(
    st.lists(st.integers(-999, 999).map(lambda n: n / 128), min_size=1, max_size=9, unique=True),
    TEMPERATURES,
    st.integers(0, 9),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.9),
)
@example([0.0, 1.0, 2.0, 3.0], 0.7, 3, 0.8, 0.2)
def test_all_filters_in_their_order(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference_probs(logits, params)
    nudged = reference_probs(
        logits,
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=max(top_p - 1e-9, 1e-9), min_p=min_p + 1e-9
        ),
    )
    assume(max(abs(a - b) for a, b in zip(expected, nudged, strict=True)) < 1e-12)
    actual = logits_to_probs(torch.tensor(logits, dtype=torch.float64), params)
    assert actual.tolist() == pytest.approx(expected, abs=1e-12)


@given(LOGITS, TEMPERATURES, st.integers(0, 9), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_always_a_distribution_in_the_dtype_given(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    for dtype in (torch.float32, torch.float64):
        probs_V = probs_of(
            logits, dtype, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        assert probs_V.dtype == dtype
        assert float(probs_V.min()) >= 0.0
        assert float(probs_V.sum()) == pytest.approx(1.0, abs=1e-6)
        assert probs_V[logits.index(max(logits))] == probs_V.max()


def test_greedy_is_one_hot_on_the_first_of_the_largest() -> None:
    assert probs_of([1.0, 3.0, 3.0], temperature=0.0).tolist() == [0.0, 1.0, 0.0]
    assert probs_of([1.0, 3.0, 3.0], temperature=0.0, top_p=0.1, top_k=1).tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-50, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy_and_not_nan(dtype: torch.dtype, temperature: float) -> None:
    logits = [-50.0, 40.0, 39.0, -math.inf]
    assert probs_of(logits, dtype, temperature=temperature).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_none_of_it_wakes_the_threads_of_torch() -> None:
    """Torch's operations on so many numbers do, and the next forward then waits for its CPUs."""
    logits_V = torch.randn(49_152, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.7, top_k=500, top_p=0.9, min_p=0.01)
    with torch.profiler.profile() as profiler:
        _ = law_of(logits_V, params).probs_V
    used = {event.name.removeprefix("aten::") for event in profiler.events()}
    arithmetic = {"sub", "mul", "div", "exp", "softmax", "_softmax", "sum", "cumsum", "max"}
    assert not used & (arithmetic | {"topk", "sort", "masked_fill", "where", "lt", "ge"})


def weights(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-17, 0.1, 1 / 3, 1.0, 7.0]), min_size=1, max_size=8),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, LAST_UNIFORM])),
)
def test_draw_never_gives_a_token_without_probability(values: list[float], u: float) -> None:
    assume(sum(values) > 0)
    assert values[draw_token(weights(*values), u)] > 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_at_the_ends(dtype: torch.dtype) -> None:
    probs_V = weights(0.0, 0.3, 0.0, 0.7, 0.0, dtype=dtype)
    assert draw_token(probs_V, 0.0) == 1
    assert draw_token(probs_V, LAST_UNIFORM) == 3


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), st.floats(0.0, LAST_UNIFORM))
def test_draw_inverts_the_cumulative_distribution(values: list[float], u: float) -> None:
    token = draw_token(weights(*values), u)
    total = sum(values)
    assert sum(values[:token]) <= u * total * (1 + 1e-12) + 1e-12
    assert u * total <= sum(values[: token + 1]) * (1 + 1e-12)


# -------------------------------------- the largest of many numbers: as a full sort would have them


@pytest.mark.parametrize("size", [1, 5, 128, 1000, 49_152])
@pytest.mark.parametrize("count", [1, 2, 7, 60, 500])
def test_they_are_those_of_a_sort(size: int, count: int) -> None:
    generator = np.random.default_rng(size + count)
    values_V = np.round(generator.normal(size=size) * 8).astype(np.float32)  # with many ties
    expected = np.lexsort((np.arange(size), -values_V))[:count].tolist()
    assert largest(values_V, count) == expected


# ------------------------------------------------------------------ log probabilities by themselves


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_they_are_computed_in_float64(kind: torch.dtype) -> None:
    logits_V = (torch.randn(50_000, generator=torch.Generator().manual_seed(3)) * 4).to(kind)
    expected_V = torch.log_softmax(logits_V.double(), 0)
    found = TokenLogprobs.of(logits_V, 7, 3)
    assert abs(found.logprob - float(expected_V[7])) < 1e-12
    likeliest = expected_V.topk(3)
    assert [token for token, _ in found.top] == likeliest.indices.tolist()
    for (_, logprob), value in zip(found.top, likeliest.values.tolist(), strict=True):
        assert abs(logprob - value) < 1e-12
