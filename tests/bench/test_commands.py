"""`foredraft measure` on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError
from foredraft.system.timing_lock import measuring


def measure(checkpoint: Path, *arguments: str) -> Result:
    sizes = ("--limit", "2", "--max-tokens", "12", "--loads", "1,2")
    model = ("--model", str(checkpoint), "--dtype", "float32")
    return CliRunner().invoke(app, ["measure", *model, *sizes, *arguments])


def test_drafters_are_measured_under_each_load(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    asked = ("--drafters", "auto", "--variant", "ngram max_ngram_size=8", "--output", str(path))
    result = measure(checkpoint, *asked)
    assert result.exit_code == 0, result.exception
    report = json.loads(path.read_text())
    (plan,) = report["plans"]
    names = {each["drafter"] for each in plan["outlooks"]}
    assert names == {"none", "auto", "ngram max_ngram_size=8"}
    assert [*plan["choices"]] == ["1", "2"]
    assert report["num_different"] == 0
    assert report["command"]
    assert "1 at once: " in result.stdout


def test_a_text_that_differs_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.bench.record.Recording.num_different", lambda *_: 1)
    assert measure(checkpoint, "--drafters", "ngram").exit_code == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--loads", "0"), "counts start at 1"),
        (("--drafters", "ngrm"), "did you mean 'ngram'"),
        (("--variant", "suffix shared"), "NAME=VALUE"),
        (("--output", "/no/such/folder/x.json"), "there is no folder"),
        (("--limit", "0"), "limit is 0"),
        (("--prompts", "no/such/file.jsonl"), "no such prompts file"),
        (("--acceptance-length", "0.5"), "a step commits at least one token"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--prompts", "p" * 5000), "File name too long"),
    ],
)
def test_bad_values_are_explained(checkpoint: Path, options: tuple[str, ...], message: str) -> None:
    error = measure(checkpoint, *options).exception
    assert isinstance(error, ConfigError | OSError)
    assert message in str(error)


def test_help_does_not_wait_for_another_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "timing.lock"
    monkeypatch.setenv("FOREDRAFT_TIMING_LOCK", str(lock))
    with measuring(lambda _: None):
        from benchmarks.__main__ import app as benchmarks

        for program, name in ((app, "measure"), (benchmarks, "step")):
            assert CliRunner().invoke(program, [name, "--help"]).exit_code == 0
