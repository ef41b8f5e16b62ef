"""Heads for other engines: what is written is read back as the same head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.eagle import EagleModule, read_published
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.trained import identify
from foredraft.train.export import export_head
from foredraft.train.heads.base import start_head, training_of
from foredraft.train.heads.saving import save_head
from tests.drafters.heads import OUTPUT_IDS, TinySource, shaken, text_batch, tiny_target

TARGET = tiny_target()
VERIFIER = ("org/tiny", ["LlamaForCausalLM"])


def saved(
    kind: type[HiddenHeadModule | EagleModule], directory: Path
) -> HiddenHeadModule | EagleModule:
    module = shaken(start_head(kind, TinySource(TARGET), OUTPUT_IDS, {}))
    with torch.no_grad():  # as it will be stored
        for weight in module.parameters():
            weight.copy_(weight.bfloat16())
    info = {"target": identify(TARGET, "tiny"), "provenance": {}, "measured": {}}
    save_head(directory, module, info, text_batch(TARGET, [[1, 2, 3, 4, 5]], module.taps), 2, "")
    assert isinstance(module, kind)
    return module


def test_an_exported_head_is_the_same_head(tmp_path: Path) -> None:
    module = saved(EagleModule, tmp_path / "head")
    for _ in range(2):  # what was exported before is written over
        export_head(tmp_path / "head", tmp_path / "out", "speculators", *VERIFIER)
    found = read_published(tmp_path / "out", TARGET)
    batch = text_batch(TARGET, [[7, 1, 9, 30, 4, 4, 2]], module.taps)
    for mine, theirs in zip(
        training_of(module).predictions(batch, 3),
        training_of(found).predictions(batch, 3),
        strict=True,
    ):
        torch.testing.assert_close(mine.logits_BLR, theirs.logits_BLR)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
    assert config["speculators_config"]["default_proposal_method"] == "greedy"
    assert config["eagle_aux_hidden_state_layer_ids"] == [tap + 1 for tap in module.taps]


def test_a_head_of_another_shape_is_refused_with_the_difference(tmp_path: Path) -> None:
    saved(HiddenHeadModule, tmp_path / "head")
    with pytest.raises(ConfigError, match=r"kind 'hidden_head': its layer.*foredraft train eagle"):
        export_head(tmp_path / "head", tmp_path / "out", "speculators", *VERIFIER)


def test_only_heads_are_written_over(tmp_path: Path) -> None:
    saved(EagleModule, tmp_path / "head")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no exported head"):
        export_head(tmp_path / "head", tmp_path / "mine", "speculators", *VERIFIER)
    with pytest.raises(ConfigError, match="did you mean 'speculators'"):
        export_head(tmp_path / "head", tmp_path / "out", "speculator", *VERIFIER)
