"""Two revisions on the same prompts: the same code twice gives the same texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.revisions import Checkout, tasks
from foredraft.core.errors import ConfigError
from tests.docs.pages import REPO


def test_a_checkout_beside_itself(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = CliRunner().invoke(
        app,
        ["revisions", str(REPO), str(REPO), "--model", str(checkpoint), "--limit", "2",
         "--max-tokens", "4", "--loads", "2", "--output", str(path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    rows = json.loads(path.read_text())["revisions"]
    assert [row["what"] for row in rows] == [
        f"{drafter}, 2 at once, T={temperature}"
        for temperature in (0, 1)
        for drafter in ("none", "auto")
    ]
    assert all(row["runs"] == 1 and row["different"] == 0 for row in rows)


def test_every_prompt_is_in_a_task_of_each_load() -> None:
    named = [*tasks("model", [*"abcd"], 8, [1, 2])]
    groups = [task["prompts"] for name, task in named if name == "auto, 2 at once, T=0"]
    assert groups == [["a", "b"], ["c", "d"]]
    assert sum(name == "none, 1 at once, T=1" for name, _ in named) == 4


def test_a_folder_without_foredraft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no checkout"):
        Checkout(tmp_path)
