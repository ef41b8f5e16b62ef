"""What a body may hold: one comparison for the fields of all dialects."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.server import messages_input, responses_input
from foredraft.server.dialects.fields import (
    REFUSED,
    FieldError,
    Refusals,
    Route,
    refuse,
    refuse_named,
)

DIALECTS = {
    "chat": REFUSED,
    "responses": responses_input.REFUSED,
    "messages": messages_input.REFUSED,
}


def lookalikes(value: Any) -> list[Any]:
    """Values that Python, or somebody in a hurry, takes for this one."""
    if isinstance(value, bool):
        return [1, "true"] if value else [0, "", []]
    return [True, str(value)] if isinstance(value, int) else []


def harmless() -> list[tuple[Refusals, str, Any]]:
    return [
        (refused, name, value)
        for refused in DIALECTS.values()
        for name, (_, values) in refused.items()
        for value in values
    ]


@pytest.mark.parametrize(("refused", "name", "value"), harmless())
def test_what_asks_for_nothing_is_taken_and_its_lookalikes_are_not(
    refused: Refusals, name: str, value: Any
) -> None:
    refuse_named({name: value}, refused)
    refuse_named({name: None}, refused)
    for other in lookalikes(value):
        with pytest.raises(FieldError, match=name):
            refuse_named({name: other}, refused)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_best_of_may_be_n(route: Route) -> None:
    refuse({"best_of": 3, "n": 3}, route)
    refuse({"best_of": 1}, route)
    for body in ({"best_of": 3}, {"best_of": 3, "n": 2}, {"best_of": True}, {"best_of": 3.0}):
        with pytest.raises(FieldError, match="best_of"):
            refuse(body, route)
