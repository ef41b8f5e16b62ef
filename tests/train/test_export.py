"""Heads for other engines: an exported head is read back as the same head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.eagle import EagleModule, read_published
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.trained import identify
from foredraft.train.export import export_head
from foredraft.train.heads.base import start_head, training_of
from foredraft.train.heads.saving import save_head
from tests.drafters.heads import OUTPUT_IDS, TinySource, shaken, text_batch, tiny_target

TARGET = tiny_target()


def saved(kind: type[HeadModule], directory: Path) -> HeadModule:
    module = shaken(start_head(kind, TinySource(TARGET), OUTPUT_IDS, {}))
    with torch.no_grad():  # as it will be stored
        for weight in module.parameters():
            weight.copy_(weight.bfloat16())
    info = {"target": identify(TARGET, "org/tiny"), "provenance": {}, "measured": {}}
    save_head(directory, module, info, text_batch(TARGET, [[1, 2, 3, 4, 5]], module.taps), 2, "")
    return module


def test_an_exported_head_is_the_same_head(tmp_path: Path) -> None:
    module, out = saved(EagleModule, tmp_path / "head"), tmp_path / "out"
    command = ["train", "export", str(tmp_path / "head"), "--out", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    found = read_published(out, TARGET)
    batch = text_batch(TARGET, [[7, 1, 9, 30, 4, 4, 2]], module.taps)
    for mine, theirs in zip(
        training_of(module).predictions(batch, 3),
        training_of(found).predictions(batch, 3),
        strict=True,
    ):
        torch.testing.assert_close(mine.logits_BLR, theirs.logits_BLR)
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"


def test_another_kind_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    saved(HiddenHeadModule, tmp_path / "head")
    with pytest.raises(ConfigError, match="of kind 'hidden_head' and not 'eagle'"):
        export_head(tmp_path / "head", tmp_path / "out")
    saved(EagleModule, tmp_path / "eagle")
    with pytest.raises(ConfigError, match="is there already"):
        export_head(tmp_path / "eagle", tmp_path / "head")
