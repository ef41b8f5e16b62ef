"""Messages of checks that refuse a value."""

from __future__ import annotations

import pytest

from foredraft.core.checks import checked_int
from foredraft.core.errors import ConfigError


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
