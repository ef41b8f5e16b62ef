"""Grammars as requests name them: what is refused before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar


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


def test_equal_grammars_are_equal() -> None:
    assert Grammar.json_schema('{"type": "object"}') == Grammar.json_schema({"type": "object"})
    assert len({Grammar.choice(["a", "b"]), Grammar.choice(("a", "b"))}) == 1
    assert Grammar.choice(["a", "b"]).choices == ["a", "b"]
