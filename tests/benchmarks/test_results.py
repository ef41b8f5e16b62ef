"""Result files become one page that says where each figure comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import render
from foredraft.bench.report import write_json
from foredraft.core.errors import ConfigError
from tests.docs.pages import REPO


def rendered(tmp_path: Path, figures: dict[str, Any]) -> str:
    write_json(str(tmp_path / "one.json"), figures, seed=7)
    return render(tmp_path)


def test_a_figure_stands_beside_its_origin(tmp_path: Path) -> None:
    page = rendered(tmp_path, {"model": "tiny"})
    report = json.loads((tmp_path / "one.json").read_text())
    assert "## one" in page
    for part in (report["command"], report["date"], report["machine"]["cpu"], "seed 7", "torch"):
        assert part in page
    assert f"{report['machine']['threads']} threads" in page


def test_records_are_a_table_and_their_parts_columns(tmp_path: Path) -> None:
    figures = [{"name": "target", "parts_ms": {"head": 1.23456}}, {"name": "a|b", "parts_ms": {}}]
    page = rendered(tmp_path, {"figures": figures, "empty": None})
    assert "| name | parts_ms: head |\n| --- | ---: |\n| target | 1.235 |\n| a\\|b |  |" in page


def test_figures_of_one_thing_share_a_cell(tmp_path: Path) -> None:
    page = rendered(tmp_path, {"heads": [{"name": "eagle", "greedy": [0.51234, 0.5]}]})
    assert "| eagle | 0.5123 0.5 |" in page


def test_raw_trials_stay_in_the_file(tmp_path: Path) -> None:
    page = rendered(tmp_path, {"trials": [{"prompt": "p", "stats": {"steps": 3}}]})
    assert "steps" not in page
    assert "[`one.json`]" in page


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one\.json holds .* no row of a table"):
        rendered(tmp_path, {"figures": [{"deep": {"deeper": {}}}]})


@pytest.mark.parametrize("text", ["{", '{"figure": 1}', "[]", "3"])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        render(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no JSON files"):
        render(tmp_path)


def test_every_file_of_our_own_is_shown() -> None:
    folder = REPO / "docs" / "results"
    page = render(folder)
    assert [path.name for path in folder.glob("*.json") if f"`{path.name}`" not in page] in (
        [],
        ["titles.json"],
    )
