"""`foredraft drafters`: every drafter is listed, with what it needs and its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.peers import peer_names
from foredraft.cli import options as o
from foredraft.cli.main import app
from foredraft.cli.trace import branches
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.drafters import drafter_spec, usable_specs
from tests.cli.conftest import Run


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["drafters", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_every_drafter_is_listed() -> None:
    listed = run()
    for name, spec in usable_specs().items():
        assert name in listed
        assert spec.summary.split(" (")[0] in listed


def test_one_drafter_is_shown_with_its_options() -> None:
    shown = run("draft-model")
    assert "a draft model" in shown
    assert "taps" in run("eagle")
    for option in drafter_spec("draft_model").options:
        assert option in shown


def test_json_has_all_of_it() -> None:
    listed = json.loads(run("--json"))
    assert listed["suffix"]["copies"]
    assert listed["none"]["options"] == {}
    assert "taps" in listed["hidden_head"]["trainable"]
    assert listed["suffix"]["trainable"] is None
    (need,) = listed["blend"]["needs"]
    assert need.startswith("a trained hidden_head")
    assert [*json.loads(run("ngram", "--json"))] == ["ngram"]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(app, ["drafters", "sufix"])
    assert isinstance(result.exception, ConfigError)
    assert "did you mean 'suffix'" in str(result.exception)


def test_what_is_taken() -> None:
    assert o.names(None) == []
    assert o.names("a, b") == ["a", "b"]
    assert o.numbers("--lengths", "0,2", int) == [0, 2]
    assert o.numbers("--tokens", "1, 8", int, low=1) == [1, 8]
    assert o.numbers("--temperature", "0,.7", float) == [0.0, 0.7]


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="--clients 'four' is not whole numbers with commas"):
        o.numbers("--clients", "four", int)
    with pytest.raises(ConfigError, match="--tokens '1,0' holds 0; counts start at 1"):
        o.numbers("--tokens", "1,0", int, low=1)
    with pytest.raises(ConfigError, match="--temperature 'warm' is not numbers with commas"):
        o.numbers("--temperature", "warm", float)
    with pytest.raises(ConfigError, match=r"did you mean 'llama\.cpp'"):
        peer_names("llama.ccp", ("llama.cpp",))


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
    assert "is there already" in str(result.exception)
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


# ------------------------------------------------------ `foredraft trace`: trees are drawn as trees


def test_other_children_begin_lines_of_their_own() -> None:
    #   0 ── 2 ── 4
    #   │    └─ 5
    #   └─ 3
    #   1
    assert branches([-1, -1, 0, 0, 2, 2]) == [(0, [0, 2, 4]), (2, [5]), (1, [3]), (0, [1])]


def test_what_was_accepted_has_a_sign(run: Run, tmp_path: Path) -> None:
    """Also where there are no colours."""
    from typer.testing import CliRunner

    from foredraft.cli.main import app

    file = tmp_path / "run.jsonl"
    drafted = run(
        "generate", "a b a b a b a b", "--max-tokens", "24", "--drafter", "ngram", "--trace",
        str(file), "--num-draft-tokens", "4",
    )  # fmt: skip
    assert drafted.exit_code == 0
    steps = [json.loads(line) for line in file.read_text().splitlines()][1:]
    accepted = sum(len(row["path"]) for step in steps for row in step["rows"])
    shown = CliRunner().invoke(app, ["trace", str(file)]).stdout
    assert shown.count("✓") == accepted + 1, "the title explains it once"
