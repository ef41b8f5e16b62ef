"""`foredraft drafters index`, and generating with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError, ForedraftError
from tests.cli.conftest import Run

NOTES = "The ferry crosses the strait twice a day, at seven and at five.\n" * 3


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / "ferry.txt").write_text(NOTES, encoding="utf-8")
    (folder / "deep" / "more.md").write_text("Tea is served at four.", encoding="utf-8")
    (folder / ".hidden").write_bytes(b"\xff\xfe")
    return folder


def build(checkpoint: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["drafters", "index", "--model", str(checkpoint), *arguments])


def test_an_index_is_built_and_used(
    run: Run, checkpoint: Path, notes: Path, tmp_path: Path
) -> None:
    index = tmp_path / "my-index"
    result = build(checkpoint, str(notes), "--output", str(index))
    assert result.exit_code == 0, result.output
    assert "2 files" in result.stdout
    asked = ("generate", "The ferry crosses the", "--max-tokens", "12", "--json")
    option = ("--drafter", "retrieval", "--drafter-option", f"index={index}")
    option += ("--num-draft-tokens", "4")  # what a node costs on this machine does not count
    drafted, plain = run(*asked, *option), run(*asked, "--drafter", "none")
    assert json.loads(drafted.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    assert json.loads(drafted.stdout)["stats"]["drafted"] > 0


def test_an_index_is_replaced_only_when_asked(
    checkpoint: Path, notes: Path, tmp_path: Path
) -> None:
    arguments = (str(notes / "ferry.txt"), "--output", str(tmp_path / "my-index"))
    assert build(checkpoint, *arguments).exit_code == 0
    again = build(checkpoint, *arguments)
    assert isinstance(again.exception, ConfigError)
    assert "--replace" in str(again.exception)
    assert build(checkpoint, *arguments, "--replace").exit_code == 0


def test_other_folders_are_left_alone(checkpoint: Path, notes: Path) -> None:
    result = build(checkpoint, str(notes / "ferry.txt"), "--output", str(notes), "--replace")
    assert isinstance(result.exception, ConfigError)
    assert "no index" in str(result.exception)
    assert (notes / "ferry.txt").read_text(encoding="utf-8") == NOTES


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["missing.txt"], "no such file or folder"),
        (["notes/.hidden"], "not UTF-8"),
        (["empty"], "no files"),
        (["blank.txt"], "no text"),
    ],
)
def test_unusable_files_are_explained(
    checkpoint: Path,
    notes: Path,
    tmp_path: Path,
    files: list[str],
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    paths = [str(tmp_path / name) for name in files]
    result = build(checkpoint, *paths, "--output", str(tmp_path / "index"))
    assert isinstance(result.exception, ForedraftError)
    assert message in str(result.exception)
    assert not (tmp_path / "index").exists()
