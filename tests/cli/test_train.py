"""`foredraft train` on a tiny checkpoint: writes its text, trains, goes on, and is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foredraft.cli.main import app
from foredraft.cli.train import parse_count
from foredraft.core.errors import ConfigError
from foredraft.train.texts import read_texts
from tests.train.helpers import some_texts


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_TIMING_LOCK", str(tmp_path / "lock"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments])


def test_text_is_written_and_gone_on_with(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{n}", "category": "c", "turns": [f"The river {n}"]} for n in range(5)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    common = ("write-text", "--target", str(checkpoint), "--out", str(tmp_path / "texts"))
    options = ("--prompts", str(prompts), "--max-tokens", "6", "--temperature", "0,1")
    result = run(*common, *options, "--tokens", "100")
    assert result.exit_code == 0, (result.output, result.exception)
    first = read_texts(tmp_path / "texts")
    assert {text.temperature for text in first} == {0.0, 1.0}
    result = run(*common, *options, "--tokens", "1k")
    assert result.exit_code == 0, (result.output, result.exception)
    more = read_texts(tmp_path / "texts")
    assert len(more) > len(first)
    assert len({text.number for text in more}) == len(more)


def test_a_head_is_trained_and_gone_on_with(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foredraft.train.texts import write_shard

    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    write_shard(tmp_path / "texts", some_texts())
    common = ("hidden_head", "--target", str(checkpoint), "--data", str(tmp_path / "texts"))
    options = ("--out", str(tmp_path / "head"), "--batch-tokens", "512", "--sequence", "64")
    more = ("--depth", "2", "--output-rows", "64", "--evaluations", "1")
    result = run(*common, *options, *more, "--tokens", "2k")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "tokens a step" in result.output
    assert (tmp_path / "head" / "head.json").exists()
    result = run(*common, *options, *more, "--tokens", "3k")
    assert result.exit_code == 0, (result.output, result.exception)
    side_by_side = tmp_path / "heads.json"
    result = run("compare", str(tmp_path / "head"), "--json", str(side_by_side))
    assert result.exit_code == 0, (result.output, result.exception)
    (head,) = json.loads(side_by_side.read_text())["heads"]
    assert head["kind"] == "hidden_head"
    assert len(head["greedy"]) == 2
    assert head["tokens"] >= 3000


def test_only_heads_are_compared(tmp_path: Path) -> None:
    result = run("compare", str(tmp_path))
    assert result.exit_code != 0
    assert "head.json" in str(result.exception or result.output)


def test_a_table_is_learnt_and_drafted_from(checkpoint: Path, tmp_path: Path) -> None:
    from foredraft.train.texts import write_shard

    write_shard(tmp_path / "texts", some_texts())
    common = ("--target", str(checkpoint), "--data", str(tmp_path / "texts"))
    out = str(tmp_path / "table")
    result = run("table", *common, "--out", out, "--megabytes", "1")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "named right" in result.output
    side_by_side = tmp_path / "heads.json"
    result = run("compare", out, "--json", str(side_by_side))
    assert result.exit_code == 0, (result.output, result.exception)
    found = {head["name"]: head for head in json.loads(side_by_side.read_text())["heads"]}
    assert found.keys() == {"table", "copies", "table + copies"}
    assert all(len(head["greedy"]) == 3 for head in found.values())
    drafting = ("--drafter", "table", "--drafter-option", f"head={out}", "--max-tokens", "4")
    words = ["generate", "a b", "--model", str(checkpoint), "--dtype", "float32", *drafting]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere", "--tokens", "1k"), "no such folder"),
        (("--data", "nowhere"), "how long"),
        (("--data", "nowhere", "--tokens", "many"), "no number"),
        (("--data", "nowhere", "--tokens", "1k", "--loss", "sotf"), "did you mean 'soft'"),
        (("--data", "nowhere", "--tokens", "1k", "--option", "tap=3"), "did you mean 'taps'"),
    ],
)
def test_mistakes_are_explained(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    out = ("--target", str(checkpoint), "--out", str(tmp_path / "head"))
    result = run("hidden_head", *out, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_counts() -> None:
    assert [parse_count(text) for text in ("7", "2k", "1.5M")] == [7, 2000, 1_500_000]
