"""`foredraft trace`: trees are drawn as trees."""

from __future__ import annotations

import json
from pathlib import Path

from foredraft.cli.trace import branches
from tests.cli.conftest import Run


def test_a_chain_is_one_line() -> None:
    assert branches([]) == []
    assert branches([-1, 0, 1]) == [(0, [0, 1, 2])]


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
