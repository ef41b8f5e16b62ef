"""Sampling parameters: what is refused, and in which words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.core.params import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1},
        {"temperature": 5e-324},
        {"top_k": 10**9},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"stop": "\n", "stop_token_ids": [0, 2]},
        {"coupling": "drawn"},
    ],
)
def test_good_values(options: dict[str, Any]) -> None:
    params = SamplingParams.of(**options)
    for name in options.keys() - {"stop", "stop_token_ids"}:
        assert getattr(params, name) == options[name]


def test_stops_become_tuples() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", bad) for bad in (NAN, INF, -INF, -0.1, True, "1", None, 10**400)],
        *[("top_p", bad) for bad in (NAN, 0, 0.0, -0.5, 1.0000001, False, "0.9", None)],
        *[("min_p", bad) for bad in (NAN, INF, -1e-9, 1.1, True, None, [0.1])],
        *[("top_k", bad) for bad in (-1, 1.0, True, "5", None, NAN)],
        *[("max_tokens", bad) for bad in (0, -1, 2.0, True, None)],
        *[("seed", bad) for bad in (-1, 2**64, 1.0, True, "7")],
        *[("stop", bad) for bad in ("", ["a", ""], [None], [b"x"], b"x", 5, None)],
        *[("stop_token_ids", bad) for bad in ([-1], [True], ["3"], "3", 3, None)],
        *[("coupling", bad) for bad in ("", "Seeded", None, 1)],
    ],
)
def test_bad_values_name_the_parameter(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**options)
    assert name.split("_")[0] in str(caught.value)
    assert isinstance(caught.value, ForedraftError)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("temprature", "temperature"), ("topk", "top_k"), ("TOP_P", "top_p"), ("max_token", "max_")],
)
def test_an_unknown_option_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{given}.*did you mean '{meant}"):
        SamplingParams.of(**{given: 1})


def test_an_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams.of(zzz=1)
    assert "did you mean" not in str(caught.value)
    assert "min_p" in str(caught.value)
    assert "temperature" in str(caught.value)


def test_parameters_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
