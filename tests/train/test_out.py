"""A head that is there is never lost: refused, kept aside, or replaced by a better one only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters.trained import load_head, read_info
from foredraft.models.files.progress import SilentProgress
from foredraft.train.folder import check_out, move_aside, state_path
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


def test_a_head_does_not_replace_a_table(target: TrainingTarget, tmp_path: Path) -> None:
    train_table(target, some_texts(), tmp_path / "t", TableOptions(), {}, SilentProgress())
    with pytest.raises(ConfigError, match="finished head of kind 'table'"):
        train(target, tmp_path / "t")


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
