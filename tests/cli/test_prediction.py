"""`foredraft generate --prediction`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.core.errors import ConfigError
from tests.cli.conftest import Run


def test_a_prediction_speeds_up_and_changes_nothing(run: Run, tmp_path: Path) -> None:
    asked = ("generate", "The ferry", "--max-tokens", "16", "--json")
    plain = json.loads(run(*asked, "--drafter", "none").stdout)
    path = tmp_path / "expected.txt"
    path.write_text(plain["text"], encoding="utf-8")
    # As measured, and with budgets that follow the machine, counts would vary.
    asked = (*asked, "--drafter-option", "node_cost=0.1", "--num-draft-tokens", "16")
    predicted = json.loads(run(*asked, "--prediction", str(path)).stdout)
    assert predicted["drafter"] == "prediction"
    assert predicted["token_ids"] == plain["token_ids"]
    assert predicted["stats"]["drafted"] > 0
    piped = run(*asked, "--prediction", "-", input=plain["text"])
    assert json.loads(piped.stdout)["stats"] == predicted["stats"]


@pytest.mark.parametrize(
    ("prompt", "prediction", "message"),
    [("x", "no/such/file", "cannot be read"), ("-", "-", "cannot both be standard input")],
)
def test_unreadable_predictions_are_explained(
    run: Run, prompt: str, prediction: str, message: str
) -> None:
    result = run("generate", prompt, "--prediction", prediction, input="text")
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    "drafting",
    [("--drafter", "ngram"), ("--drafter", "none"), ("--draft-model", "x")],
)  # fmt: skip
def test_a_prediction_that_nothing_uses_is_refused(
    run: Run, tmp_path: Path, drafting: tuple[str, ...]
) -> None:
    path = tmp_path / "expected.txt"
    path.write_text("text")
    result = run("generate", "x", "--prediction", str(path), *drafting)
    assert isinstance(result.exception, ConfigError)
    assert "--prediction is not used by drafter" in str(result.exception)
