"""`foredraft tune`, on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError

TEXT = "The ferry crosses the river twice a day, in the morning and in the evening. " * 6


def tune(checkpoint: Path, *arguments: str) -> str:
    options = ["--model", str(checkpoint), "--dtype", "float32", "--tokens", "64", "--repeats", "1"]
    result = CliRunner().invoke(app, ["tune", "exit", *options, *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_exit_prints_a_table_and_its_advice(checkpoint: Path) -> None:
    output = tune(checkpoint)
    assert "first layer" in output
    assert "first 2 layers" in output
    assert "plain decoding is faster" in output or "--drafter-option exit-layer=" in output


def test_exit_judges_by_a_text(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(TEXT)
    report = json.loads(tune(checkpoint, "--text", str(file), "--json"))
    assert [c["options"] for c in report["candidates"]] == [{"exit_layer": 1}, {"exit_layer": 2}]
    assert report["best"] in report["candidates"]
    assert report["best"]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "no/such/file.txt"), "no/such/file.txt"),
    ],
)
def test_exit_explains_bad_values(
    checkpoint: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(checkpoint, *arguments)


def test_a_text_that_is_too_short_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("Hi.")
    with pytest.raises(ConfigError, match="too short"):
        tune(checkpoint, "--text", str(file))


def test_load_says_what_it_would_choose(checkpoint: Path) -> None:
    options = ["--model", str(checkpoint), "--dtype", "float32", "--tokens", "12"]
    result = CliRunner().invoke(app, ["tune", "load", *options, "--concurrency", "1,2", "--json"])
    assert result.exit_code == 0, result.exception
    choices = json.loads(result.stdout)
    assert [choice["load"] for choice in choices] == [1, 2]
    assert all(choice["why"] and choice["plain_ms"] > 0 for choice in choices)
    shown = CliRunner().invoke(app, ["tune", "load", *options, "--concurrency", "1"])
    assert "committed" in shown.stdout
    wrong = CliRunner().invoke(app, ["tune", "load", *options, "--concurrency", "0"])
    assert isinstance(wrong.exception, ConfigError)
