"""Acceptance lengths by category, as SPEED-Bench counts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.bench.acceptance import ALL, Counts, figures, synthetic_report, write_golden
from foredraft.bench.prompts import load_prompts
from foredraft.bench.record import Setting
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from tests.bench.test_commands import measure

SETTING = Setting("ngram", 4)


def test_it_is_one_and_accepted_by_drafts_and_the_mean_is_of_categories() -> None:
    counts = [
        Counts("coding", drafts=10, drafted=40, accepted=20, tokens=30, seconds=1.0),
        Counts("coding", drafts=10, drafted=40, accepted=0, tokens=10, seconds=1.0),
        Counts("writing", drafts=0, drafted=0, accepted=0, tokens=10, seconds=0.5),
    ]
    coding, writing, mean = figures(SETTING, counts)
    assert coding["acceptance_length"] == 2.0
    assert coding["acceptance_rate"] == 0.25
    assert coding["tokens_per_s"] == 20.0
    assert writing["acceptance_length"] == 1.0
    assert mean["category"] == ALL
    assert mean["acceptance_length"] == 1.5
    low, high = mean["interval"]
    assert low == 1.0 < 1.5 < high == 2.0, "prompts are drawn within their category"


def test_a_golden_file_is_that_of_coding(tmp_path: Path) -> None:
    counts = [Counts(kind, 10, 40, 17, 27, 1.0) for kind in ("coding", "writing")]
    rows = [row for n in (1, 2) for row in figures(Setting("ngram", n), counts)]
    write_golden(tmp_path / "g.yaml", "m", rows, "output_len: 4096")
    text = (tmp_path / "g.yaml").read_text()
    assert "# dataset: coding | output_len: 4096" in text
    assert text.endswith("m:\n  thinking_off:\n    1: 2.70\n    2: 2.70\n")
    with pytest.raises(ConfigError, match="one drafter"):
        write_golden(tmp_path / "g", "m", [*rows, *figures(Setting("suffix"), counts)], "")


def test_a_synthetic_length_is_priced_by_the_forwards() -> None:
    report = synthetic_report(3.0, CostModel(((1, 10.0), (3, 10.0), (12, 40.0))), [1, 4], 8)
    [table] = report.tables
    assert [row["drafted"] for row in table.rows] == [*range(2, 9)], "fewer cannot bring three"
    assert table.rows[0]["at1"] == pytest.approx(3.0)
    assert table.rows[0]["at4"] < 1.5


def test_every_turn_is_asked_through_the_command(checkpoint: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "speed.jsonl", tmp_path / "out.json"
    entry = {"question_id": 7, "category": "coding", "turns": ["the ferry", "the ferry again"]}
    path.write_text(json.dumps(entry) + "\n")
    assert load_prompts(str(path))[0].turns == ("the ferry", "the ferry again")
    asked = ("--acceptance", "1,3", "--drafters", "ngram", "--prompts", str(path))
    golden = ("--golden", str(tmp_path / "g.yaml"), "--output", str(out))
    result = measure(checkpoint, *asked, *golden)
    assert result.exit_code == 0, result.exception
    rows = json.loads(out.read_text())["acceptance"]
    assert [(row["category"], row["draft_length"]) for row in rows] == [
        *(("coding", 1), (ALL, 1), ("coding", 3), (ALL, 3)),
    ]
    assert all(1.0 <= row["acceptance_length"] <= 1 + row["draft_length"] for row in rows)
    assert "thinking_off" in (tmp_path / "g.yaml").read_text()


def test_a_synthetic_length_below_one_is_refused(checkpoint: Path) -> None:
    assert measure(checkpoint, "--acceptance-length", "1.5").exit_code == 0
    error = measure(checkpoint, "--acceptance-length", "0.5").exception
    assert "a step commits at least one token" in str(error)
