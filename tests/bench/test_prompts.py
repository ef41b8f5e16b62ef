"""Prompts to measure with: the built-in ones and files of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.bench.prompts import built_in_prompts, load_prompts
from foredraft.core.errors import ConfigError


def test_any_number_of_built_in_prompts_is_a_fair_mix() -> None:
    assert [p.category for p in load_prompts(None, 3)] == ["chat", "summarise", "edit"]
    assert load_prompts(None, 3) == load_prompts(None)[:3] == list(built_in_prompts()[:3])
    assert len(load_prompts(None)) == 10


def test_a_limit_takes_from_every_category(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"{c}{i}", "category": c, "turns": [f"{c} {i}"]} for c in "ab" for i in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert [p.id for p in load_prompts(str(path), 4)] == ["a0", "b0", "a1", "b1"]
    assert len(load_prompts(str(path), 99)) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts"),
        ('{"id": 1}', "line 1"),
        ("{", "line 1"),
        ('{"id":1,"category":"a","turns":[]}', "line 1"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_prompts(str(path))


def test_a_missing_file_and_a_limit_of_nothing_are_errors() -> None:
    with pytest.raises(ConfigError, match="no such prompts file"):
        load_prompts("no/such/file.jsonl")
    with pytest.raises(ConfigError, match="limit is 0"):
        load_prompts(None, 0)
