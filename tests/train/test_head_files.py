"""Heads on disk: found damaged, of another kind, of another target, or as they were saved."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.core.errors import ConfigError, ForedraftError, ModelLoadError
from foredraft.drafters.trained import finish_saving, identify, load_head, read_info
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.saving import load_tested
from foredraft.train.target import TrainingTarget
from tests.train.helpers import LinearHead, OtherHead, Watch, options_of, train, training_target


@pytest.fixture
def head(target: TrainingTarget, tmp_path: Path) -> Path:
    train(target, tmp_path / "head", watch=Watch(stop_after=2), options=options_of(evaluations=1))
    return tmp_path / "head"


def test_it_is_what_was_saved(target: TrainingTarget, head: Path) -> None:
    loaded = load_head(head, LinearHead, target.identity)
    stored = load_file(head / "weights.safetensors")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), name
    info = read_info(head)
    assert info.provenance["data"] == "rules"
    assert info.measured["committed_greedy"] >= 1.0
    assert os.stat(head / "weights.safetensors").st_mode & 0o044


def test_a_head_of_another_target_is_refused(head: Path, other_checkpoint: Path) -> None:
    other = training_target(other_checkpoint, "stranger")
    with pytest.raises(ConfigError, match=r"trained for 'tiny' .* the target is 'stranger'"):
        load_head(head, LinearHead, other.identity)


def test_the_dtype_of_the_target_does_not_matter(head: Path, checkpoint: Path) -> None:
    target = NativeTarget.load(checkpoint, torch.bfloat16)
    assert load_head(head, LinearHead, identify(target)).kind == "linear"


def test_another_kind_is_refused(target: TrainingTarget, head: Path) -> None:
    with pytest.raises(ConfigError, match="of kind 'linear' and not 'other'"):
        load_head(head, OtherHead, target.identity)


def test_no_head_is_there(target: TrainingTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trained head"):
        load_head(tmp_path, LinearHead, target.identity)


@pytest.mark.parametrize("name", ["weights.safetensors", "self_test.safetensors"])
def test_a_torn_file_is_explained(target: TrainingTarget, head: Path, name: str) -> None:
    (head / name).write_bytes((head / name).read_bytes()[:-10])
    with pytest.raises(ForedraftError, match=name.replace(".", r"\.")):
        load_tested(head, LinearHead, target.identity)


def test_other_logits_than_when_it_was_saved(target: TrainingTarget, head: Path) -> None:
    tensors = load_file(head / "self_test.safetensors")
    save_file(tensors | {"logits": tensors["logits"] + 1}, head / "self_test.safetensors")
    with pytest.raises(ModelLoadError, match="other logits"):
        load_tested(head, LinearHead, target.identity)


def test_an_interrupted_swap_is_completed(target: TrainingTarget, head: Path) -> None:
    """Killed after the new files were ready, with one of them in its place."""
    ready = head / ".ready"
    ready.mkdir()
    for name in ("weights.safetensors", "self_test.safetensors"):
        os.replace(head / name, ready / name)
    with pytest.raises(ForedraftError):
        load_head(head, LinearHead, target.identity)
    finish_saving(head)
    assert load_head(head, LinearHead, target.identity).kind == "linear"
