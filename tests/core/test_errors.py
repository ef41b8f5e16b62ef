"""Errors name the nearest thing that does exist."""

from __future__ import annotations

import pytest

from foredraft.core import errors
from foredraft.core.checks import checked_int
from foredraft.core.errors import ConfigError, ForedraftError, nearest, unknown

DRAFTERS = ("ngram", "draft_model", "none")


@pytest.mark.parametrize(
    ("name", "found"),
    [("ngrams", "ngram"), ("NGRAM", "ngram"), ("draft-model", "draft_model"), ("non", "none")],
)
def test_nearest(name: str, found: str) -> None:
    assert nearest(name, DRAFTERS) == f"; did you mean {found!r}?"


def test_unknown_says_what_was_given_what_was_meant_and_what_there_is() -> None:
    error = unknown("drafter", "ngrm", iter(DRAFTERS))
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "unknown drafter 'ngrm'; did you mean 'ngram'? (known: draft_model, ngram, none)"
    )


def test_every_error_is_one_of_ours() -> None:
    named = [item for item in vars(errors).values() if isinstance(item, type)]
    ours = [item for item in named if item.__module__ == errors.__name__]
    assert len(ours) >= 8
    for error in ours:
        assert issubclass(error, ForedraftError), error
        assert error.__doc__, error


# ----------------------------------------------------------- messages of checks that refuse a value


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("stop", "stop"),
        ("messages[3].role", "messages"),
        ("prediction.content", "prediction"),
        ("grammar (regex)", "grammar"),
        ("the prompt", None),
    ],
)
def test_errors_carry_the_field(name: str, field: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        checked_int(name, "x", low=1)
    assert raised.value.field == field
