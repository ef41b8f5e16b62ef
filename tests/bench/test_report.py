"""Result files say where their figures come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.bench.report import write_json
from foredraft.core.errors import ConfigError


def test_a_file_carries_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(str(path), {"figure": 3}, seed=5)
    report = json.loads(path.read_text())
    assert report["figure"] == 3
    assert report["seed"] == 5
    assert {"command", "revision", "date", "machine"} <= set(report)
    assert {"cpu", "gpu", "threads", "versions"} <= set(report["machine"])


def test_a_place_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_json("/no/such/folder/out.json", {}, seed=0)
