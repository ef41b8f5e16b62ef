"""A head that is there is never lost, and is what was saved."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.core.errors import ConfigError, ForedraftError, ModelLoadError
from foredraft.drafters.trained import finish_saving, identify, load_head, read_info
from foredraft.models.files.progress import SilentProgress
from foredraft.models.native.target import NativeTarget
from foredraft.train.folder import check_out, move_aside, state_path
from foredraft.train.heads.saving import load_tested
from foredraft.train.options import TableOptions
from foredraft.train.table import train_table
from foredraft.train.target import TrainingTarget
from tests.train.helpers import (
    LinearHead,
    OtherHead,
    Watch,
    options_of,
    some_texts,
    train,
    trainer_of,
    training_target,
)


@pytest.fixture
def head(target: TrainingTarget, tmp_path: Path) -> Path:
    """A trained head as it is handed on: without the folder that training goes on with."""
    train(target, tmp_path / "head", options=options_of(tokens=12_000))
    shutil.rmtree(tmp_path / "head" / "training")
    return tmp_path / "head"


def weights_of(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("kind", [LinearHead, OtherHead])
def test_a_finished_head_is_not_trained_over(
    target: TrainingTarget, head: Path, kind: type[LinearHead]
) -> None:
    before = weights_of(head)
    with pytest.raises(ConfigError) as error:
        train(target, head, kind=kind, watch=Watch(stop_after=1))
    for part in ("'linear'", "tokens a step", "another --out", "--replace", "head.old-1"):
        assert part in str(error.value)
    assert ("--start-from" in str(error.value)) == (kind is LinearHead)
    assert weights_of(head) == before


def test_a_table_does_not_replace_a_head(target: TrainingTarget, head: Path) -> None:
    with pytest.raises(ConfigError, match="finished head of kind 'linear'"):
        train_table(target, some_texts(), head, TableOptions(), {}, SilentProgress())
    assert read_info(head).kind == "linear"


def test_a_better_table_is_kept(target: TrainingTarget, tmp_path: Path) -> None:
    texts, out = some_texts(), tmp_path / "table"
    train_table(target, texts, out, TableOptions(min_count=1), {}, SilentProgress())
    before = weights_of(out)
    few = [text for text in texts if text.is_held_out] + texts[:20]
    with pytest.raises(ConfigError, match=r"holds a better table: .* --replace"):
        train_table(target, few, out, TableOptions(megabytes=0.0001), {}, SilentProgress())
    assert weights_of(out) == before
    train_table(target, texts, out, TableOptions(min_count=1), {"again": True}, SilentProgress())
    assert read_info(out).provenance["again"]


def test_what_is_replaced_is_kept_aside(target: TrainingTarget, head: Path) -> None:
    before = weights_of(head)
    (head / "training" / "texts-self").mkdir(parents=True)
    (head / "training" / "texts-self" / "part-0000.npz").write_bytes(b"text")
    assert move_aside(head) == head.with_name("head.old-1")
    assert (head / "training" / "texts-self" / "part-0000.npz").exists()
    train(target, head, kind=OtherHead, watch=Watch(stop_after=1))
    assert weights_of(head.with_name("head.old-1")) == before
    assert read_info(head).kind == "other"
    assert move_aside(head) == head.with_name("head.old-2")
    assert move_aside(head) is None


def test_a_head_is_trained_further_from_itself(target: TrainingTarget, head: Path) -> None:
    """It is measured first, and a checkpoint that is not better does not replace it."""
    before, watch = weights_of(head), Watch(stop_after=1)
    trainer = trainer_of(target, head, watch=watch, start_from=head)
    trainer.run()
    assert trainer.counters.best >= watch.statuses[0].acceptance.score  # type: ignore[union-attr]
    assert weights_of(head) == before
    assert state_path(head).exists()
    check_out(head, "linear")  # the same command goes on


def test_a_better_head_that_was_put_there_is_kept(
    target: TrainingTarget, head: Path, tmp_path: Path
) -> None:
    """The state of another, worse training beside it does not know of it."""
    train(target, tmp_path / "worse", watch=Watch(stop_after=1))
    for name in ("head.json", "weights.safetensors", "self_test.safetensors"):
        shutil.copy(head / name, tmp_path / "worse" / name)
    train(target, tmp_path / "worse", watch=Watch(stop_after=1), options=options_of(evaluations=20))
    assert weights_of(tmp_path / "worse") == weights_of(head)


def test_a_head_of_another_target_is_not_replaced(head: Path, other_checkpoint: Path) -> None:
    other = training_target(other_checkpoint, "stranger")
    with pytest.raises(ConfigError, match="trained for 'tiny'"):
        train(other, head, start_from=head)
    assert load_head(head, LinearHead, read_info(head).target)


def test_a_folder_of_something_else_is_left_alone(target: TrainingTarget, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my notes")
    with pytest.raises(ConfigError, match=r"README\.md that is not of a head"):
        trainer_of(target, tmp_path)
    assert (tmp_path / "README.md").read_text() == "my notes"


# ------------------------------------------------------------------------------------ heads on disk


@pytest.fixture
def saved(target: TrainingTarget, tmp_path: Path) -> Path:
    train(target, tmp_path / "saved", watch=Watch(stop_after=2), options=options_of(evaluations=1))
    return tmp_path / "saved"


def test_it_is_what_was_saved(target: TrainingTarget, saved: Path) -> None:
    loaded = load_head(saved, LinearHead, target.identity)
    stored = load_file(saved / "weights.safetensors")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), name
    info = read_info(saved)
    assert info.provenance["data"] == "rules"
    assert info.measured["committed_greedy"] >= 1.0
    assert os.stat(saved / "weights.safetensors").st_mode & 0o044


def test_the_dtype_of_the_target_does_not_matter(saved: Path, checkpoint: Path) -> None:
    target = NativeTarget.load(checkpoint, torch.bfloat16)
    assert load_head(saved, LinearHead, identify(target)).kind == "linear"


def test_no_head_is_there(target: TrainingTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trained head"):
        load_head(tmp_path, LinearHead, target.identity)


@pytest.mark.parametrize("name", ["weights.safetensors", "self_test.safetensors"])
def test_a_torn_file_is_explained(target: TrainingTarget, saved: Path, name: str) -> None:
    (saved / name).write_bytes((saved / name).read_bytes()[:-10])
    with pytest.raises(ForedraftError, match=name.replace(".", r"\.")):
        load_tested(saved, LinearHead, target.identity)


def test_other_logits_than_when_it_was_saved(target: TrainingTarget, saved: Path) -> None:
    tensors = load_file(saved / "self_test.safetensors")
    save_file(tensors | {"logits": tensors["logits"] + 1}, saved / "self_test.safetensors")
    with pytest.raises(ModelLoadError, match="other logits"):
        load_tested(saved, LinearHead, target.identity)


def test_an_interrupted_swap_is_completed(target: TrainingTarget, saved: Path) -> None:
    """Killed after the new files were ready, with one of them in its place."""
    ready = saved / ".ready"
    ready.mkdir()
    for name in ("weights.safetensors", "self_test.safetensors"):
        os.replace(saved / name, ready / name)
    with pytest.raises(ForedraftError):
        load_head(saved, LinearHead, target.identity)
    finish_saving(saved)
    assert load_head(saved, LinearHead, target.identity).kind == "linear"
