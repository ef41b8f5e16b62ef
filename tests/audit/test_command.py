"""The command: what it refuses before a model is loaded."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--drafter", "none"), "nothing to audit"),
        (("--detect", "0"), "detect is 0.0"),
        (("--set", "alpha=0.9"), "alpha is 0.9"),
        (("--plain-endpoint", "http://127.0.0.1:1"), "goes with an endpoint"),
        (("--endpoint", "localhost:8000"), "no address"),
        (("--output", "/no/such/place/audit.json"), "no folder"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(options: tuple[str, ...], says: str) -> None:
    error = CliRunner().invoke(app, ["audit", *options]).exception
    assert isinstance(error, ConfigError)
    assert says in str(error)
