"""The notebook runs from top to bottom, and is kept without what it printed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.docs.pages import REPO

NOTEBOOK = REPO / "examples" / "notebook" / "foredraft.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def sources() -> list[str]:
    """Of the cells with Python, but for the one that installs."""
    made = ["".join(each["source"]) for each in cells() if each["cell_type"] == "code"]
    return [source for source in made if "%pip" not in source]


def test_it_has_ten_cells_and_no_outputs() -> None:
    assert len(cells()) == 10
    assert not any(each.get("outputs") or each.get("execution_count") for each in cells())
    for source in sources():
        compile(source, "cell", "exec")


@pytest.mark.slow
@pytest.mark.real_model
def test_every_cell_runs_and_says_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    printed = []
    for source in sources():
        exec(compile(source, "cell", "exec"), names)  # noqa: S102
        printed.append(capsys.readouterr().out)
    assert names["one"].stats.steps > names["other"].stats.steps, "drafts save forwards"
    assert float(printed[4].rsplit(" ", 1)[1]) < 0.01, "words come out as p has them"
    hashes = {line.split()[1] for line in printed[6].splitlines()}
    assert len(hashes) == 1, "one seed, one text"
