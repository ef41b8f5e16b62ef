"""`foredraft train export`: a head of this very target, and of no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.eagle import EagleModule
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.base import TextBatch, start_head
from foredraft.train.heads.saving import save_head
from foredraft.train.target import TrainingTarget


@pytest.fixture
def head(checkpoint: Path, tmp_path: Path) -> Path:
    source = TrainingTarget(NativeTarget.load(checkpoint), "tiny", "its weights")
    module = start_head(EagleModule, source, range(20), {})
    tokens = torch.arange(6)
    (states,) = source.read([tokens.numpy()], module.taps)
    taps = {layer: states.layers[layer][None] for layer in module.taps}
    text = TextBatch(tokens[None], torch.tensor([6]), source.parts.embed(tokens)[None], taps)
    info = {"target": source.identity, "provenance": {}, "measured": {}}
    save_head(tmp_path / "head", module, info, text, 2, "")
    return tmp_path / "head"


def test_a_head_is_exported_with_the_name_of_its_target(
    checkpoint: Path, head: Path, tmp_path: Path
) -> None:
    common = [
        "train",
        "export",
        str(head),
        "--target",
        str(checkpoint),
        "--out",
        str(tmp_path / "out"),
    ]
    for more, name in (([], str(checkpoint)), (["--verifier", "org/tiny"], "org/tiny")):
        result = CliRunner().invoke(app, [*common, *more])
        assert result.exit_code == 0, (result.output, result.exception)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        verifier = config["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": name, "architectures": ["LlamaForCausalLM"]}


def test_a_head_of_another_target_is_refused(checkpoint: Path, head: Path, tmp_path: Path) -> None:
    meta = json.loads((head / "head.json").read_text())
    meta["target"]["fingerprint"] = "0" * 16
    (head / "head.json").write_text(json.dumps(meta))
    out = ["--target", str(checkpoint), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["train", "export", str(head), *out])
    assert isinstance(result.exception, ConfigError)
    assert "trained for 'tiny'" in str(result.exception)
