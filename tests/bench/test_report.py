"""Result files say where their figures come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.bench.report import check_outputs, write_json
from foredraft.core.errors import ConfigError


def test_a_file_carries_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(str(path), {"figure": 3}, seed=5)
    report = json.loads(path.read_text())
    assert report["figure"] == 3
    assert report["seed"] == 5
    assert {"command", "revision", "date", "machine"} <= set(report)
    assert {"cpu", "gpu", "threads", "versions"} <= set(report["machine"])


def test_the_switch_of_the_kernels_is_part_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_KERNELS", "off")
    monkeypatch.setattr("sys.argv", ["/usr/bin/foredraft", "measure"])
    path = tmp_path / "out.json"
    write_json(str(path), {}, seed=0)
    assert json.loads(path.read_text())["command"] == "FOREDRAFT_KERNELS=off foredraft measure"


def test_a_place_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_json("/no/such/folder/out.json", {}, seed=0)


def test_outputs_are_checked_before_anything_is_measured(tmp_path: Path) -> None:
    check_outputs(None)
    check_outputs(str(tmp_path / "out.json"))
    with pytest.raises(ConfigError, match="no folder"):
        check_outputs(str(tmp_path / "no" / "out.json"))
