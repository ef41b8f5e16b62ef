"""Sampling parameters: what is refused, and in which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.core.grammar import Grammar
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


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("temperature", 2**64, float(2**64)),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", np.float64(0.25), 0.25),
        ("top_p", Fraction(1, 4), 0.25),
        ("top_k", np.int32(5), 5),
        ("max_tokens", np.int64(5), 5),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("stop_token_ids", np.array([1, 2]), (1, 2)),
        ("ignore_eos", np.bool_(True), True),
    ],
)
def test_numbers_of_other_kinds_become_pythons(name: str, value: object, plain: object) -> None:
    options: dict[str, Any] = {name: value}
    kept = getattr(SamplingParams(**options), name)
    assert kept == plain
    assert type(kept) is type(plain)


def test_long_values_are_not_shown_in_full() -> None:
    for options in ({"seed": 10**9999}, {"stop": ["x"] * 10**6}, {"max_tokens": "x" * 10**6}):
        with pytest.raises(ConfigError) as caught:
            SamplingParams(**options)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", bad) for bad in (NAN, INF, -INF, -0.1, True, "1", None, 10**400)],
        *[("top_p", bad) for bad in (NAN, 0, 0.0, -0.5, 1.0000001, False, "0.9", None)],
        *[("min_p", bad) for bad in (NAN, INF, -1e-9, 1.1, True, None, [0.1])],
        *[("top_k", bad) for bad in (-1, 1.0, True, "5", None, NAN)],
        *[("max_tokens", bad) for bad in (0, -1, 2.0, True, None)],
        *[("seed", bad) for bad in (-1, 2**64, 1.0, True, "7", np.bool_(True), np.float64(1))],
        *[("stop", bad) for bad in ("", ["a", ""], [None], [b"x"], b"x", 5, None)],
        *[("stop", bad) for bad in ({"a": 1}, ["a\ud800"], "\ud800", ["x"] * 257, "x" * 65537)],
        *[("stop_token_ids", bad) for bad in ([-1], [True], ["3"], "3", 3, None, b"ab", {1: 2})],
        *[("ignore_eos", bad) for bad in ("false", "true", 0, 1, None)],
        *[("prediction", bad) for bad in (3, b"x", ["x"], "a\udfff")],
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
    ("name", "value"),
    [
        *[("repetition_penalty", bad) for bad in (0, -1.0, 101, NAN, True, None)],
        *[("presence_penalty", bad) for bad in (2.1, -2.1, NAN, "1", None)],
        *[("frequency_penalty", bad) for bad in (2.1, -2.1, INF, None)],
        *[("logit_bias", bad) for bad in (None, [1], {-1: 1.0}, {1: 101}, {"1": 1}, {1: NAN})],
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        *[("allowed_token_ids", bad) for bad in ([], [-1], 3, "3")],
        *[("bad_words", bad) for bad in ([""], [3], None, ["x"] * 257)],
        *[("grammar", bad) for bad in ("json", {"type": "object"}, 1)],
        *[("n", bad) for bad in (0, 129, True, None)],
        *[("min_tokens", bad) for bad in (-1, 257, None)],
        *[("include_stop", bad) for bad in (1, "yes", None)],
        *[("logprobs", bad) for bad in (-1, 21, True)],
        *[("prompt_logprobs", bad) for bad in (-1, 21, True)],
    ],
)
def test_bad_values_of_rules_name_the_parameter(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


def test_replies_to_one_prompt_have_seeds_of_their_own() -> None:
    each = SamplingParams(n=3, seed=2**64 - 2).each()
    assert [(params.n, params.seed) for params in each] == [(1, 2**64 - 2), (1, 2**64 - 1), (1, 0)]
    assert [params.seed for params in SamplingParams(n=2).each()] == [None, None]


def test_parameters_are_copied_with_what_they_hold() -> None:
    params = SamplingParams(logit_bias={3: 1}, allowed_token_ids=[1, 2], bad_words="x")
    assert replace(params, seed=1).logit_bias == {3: 1.0}
    assert params.allowed_token_ids == (1, 2)
    assert params.bad_words == ("x",)
    assert hash(params) == hash(replace(params))


# ------------------------------------------------------------------- grammars as requests name them


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Grammar("jsonschema"), "did you mean 'json_schema'"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema("{"), "no JSON"),
        (lambda: Grammar.json_schema("[1]"), "must be an object"),
        (lambda: Grammar.json_schema({"a": object()}), "cannot be written"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "cannot be written"),
        (lambda: Grammar.json_schema(nested(65)), "deeper than 64"),
        (lambda: Grammar.json_schema(nested(100_000)), "deeper than 64"),
        (lambda: Grammar.json_schema("[" * 100_000), "no JSON"),
        (lambda: Grammar.regex("x" * 300_000), "300000 characters"),
        (lambda: Grammar.regex(3), "must be text"),  # type: ignore[arg-type]
        (lambda: Grammar.choice([]), "0 texts"),
        (lambda: Grammar.choice([""]), "empty text"),
        (lambda: Grammar.choice("yes"), "must be a list"),
        (lambda: Grammar.choice(["x"] * 1025), "1025 texts"),
    ],
)
def test_what_cannot_be_a_grammar(build: Callable[[], Grammar], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build()
