"""Texts compared with the text alone: what differs is counted, and nothing is run twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.same_text import ALONE, COMPANY, MODEL, Parted, TextLog, Texts, write_all
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams

PROMPTS = {name: [number] for number, name in enumerate("abcde")}


class Counting:
    """Writes three tokens; with company, those of the prompt 3 end otherwise."""

    name, ways = "engine", (ALONE, MODEL, COMPANY)

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def write(self, way: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Texts:
        self.asked.append((way, len(prompts)))
        return [[ids[0], 7, 8 + (way == COMPANY and ids[0] == 3)] for ids in prompts]


def test_it_counts_texts_that_differ_and_where(tmp_path: Path) -> None:
    engine = Counting()
    found = write_all(engine, PROMPTS, SamplingParams(), 2, TextLog(tmp_path / "log", {}))
    assert found == [
        Parted("engine", MODEL, 0.0, 5, 0, None, 15),
        Parted("engine", COMPANY, 0.0, 5, 1, 2, 15),
    ]
    assert engine.asked.count((COMPANY, 2)) == 2, "company comes in groups"
    assert engine.asked.count((ALONE, 1)) == 5


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    write_all(Counting(), PROMPTS, SamplingParams(), 2, TextLog(tmp_path / "log", {"of": 1}))
    lines = (tmp_path / "log").read_text().splitlines()
    (tmp_path / "log").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:9])  # killed
    engine = Counting()
    log = TextLog(tmp_path / "log", {"of": 1})
    assert len(write_all(engine, PROMPTS, SamplingParams(), 2, log)) == 2
    assert engine.asked == [(COMPANY, 1)]
    with pytest.raises(ConfigError, match="another comparison"):
        TextLog(tmp_path / "log", {"of": 2})


def test_a_text_that_ends_early_differs_at_its_end() -> None:
    assert Parted.of("engine", MODEL, 0.0, [[1, 2, 3]], [[1, 2]]).first == 2
