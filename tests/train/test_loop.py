"""Training end to end on a tiny target: it learns, resumes to the bit, and fails with a reason."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import foredraft.system.files
from foredraft.core.errors import CapabilityError, ConfigError, TrainingError
from foredraft.drafters.trained import load_head
from foredraft.models.table import TableModel
from foredraft.train.folder import read_curves
from foredraft.train.heads.base import Prediction, TextBatch
from foredraft.train.loop import Trainer
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import split_texts
from tests.train.helpers import (
    LinearHead,
    LinearTraining,
    Watch,
    counted_reads,
    options_of,
    some_texts,
    train,
    trainer_of,
)


def state_of(out: Path) -> dict[str, Tensor]:
    return load_file(out / "training" / "state.safetensors")


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_head_learns_and_is_kept(target: TrainingTarget, tmp_path: Path) -> None:
    watch = Watch()
    result = train(target, tmp_path / "head", watch=watch, options=options_of(tokens=30_000))
    assert result.done >= 1
    assert result.tokens >= 30_000
    first, last = watch.statuses[0].acceptance, watch.statuses[-1].acceptance
    assert first is not None
    assert last is not None
    # The texts follow a rule, the target does not: greedy text can be learnt by heart.
    assert last.overlap[0] > first.overlap[0] + 0.05
    head = load_head(tmp_path / "head", LinearHead, target.identity)
    assert head.output_ids_R is not None
    card = (tmp_path / "head" / "README.md").read_text()
    assert "kind linear for tiny" in card
    assert "## Acceptance on held-out text" in card
    lines = read_curves(tmp_path / "head" / "training" / "curves.jsonl")
    assert next(line["tokens"] for line in lines if "score" in line) == 0


def test_what_chooses_a_checkpoint_is_not_what_is_reported(
    target: TrainingTarget, tmp_path: Path
) -> None:
    texts = some_texts(1200)
    trainer = trainer_of(target, tmp_path / "head", texts=texts)
    trainer.run()
    chosen, reported = (
        {window.text for batch in batches for window in batch}
        for batches in (trainer._evaluation, trainer._reported)
    )
    assert chosen
    assert reported
    assert not chosen & reported
    _, held_out = split_texts(texts)
    assert chosen | reported <= {*held_out}
    head = load_head(tmp_path / "head", LinearHead, target.identity)
    score = trainer.measure(head, trainer._reported).score
    info = json.loads((tmp_path / "head" / "head.json").read_text())
    assert info["measured"]["score"] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_was_interrupted_ends_with_the_same_bits(
    target: TrainingTarget, tmp_path: Path, how: str
) -> None:
    train(target, tmp_path / "whole", options=options_of(save_s=0))
    if how == "stop":
        result = train(target, tmp_path / "cut", watch=Watch(stop_after=3))
        assert result.done < 1
    else:
        with pytest.raises(KeyboardInterrupt):
            train(target, tmp_path / "cut", watch=Watch(fail_after=5), options=options_of(save_s=0))
    result = train(target, tmp_path / "cut", options=options_of(save_s=0))
    assert result.done >= 1
    assert_same(state_of(tmp_path / "whole"), state_of(tmp_path / "cut"))


def test_states_that_do_not_fit_are_computed_again(target: TrainingTarget, tmp_path: Path) -> None:
    train(target, tmp_path / "a" / "head")
    train(target, tmp_path / "b" / "head", capture_bytes=0)
    assert not list((tmp_path / "b" / "captures").rglob("*.safetensors"))
    first, second = state_of(tmp_path / "a" / "head"), state_of(tmp_path / "b" / "head")
    for name, tensor in first.items():
        if name.startswith("module/") and tensor.is_floating_point():
            # Captured states are rounded to bfloat16, and here the target computes in float32.
            torch.testing.assert_close(tensor, second[name], rtol=0.2, atol=0.05)


def test_captures_are_shared_and_found_again(
    target: TrainingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(target, tmp_path / "one")
    read = counted_reads(monkeypatch)
    train(target, tmp_path / "two")
    assert not read
    # Further text at the end: only that, and the chunk that it joins, is read.
    train(target, tmp_path / "three", texts=[*some_texts(), *some_texts(20, seed=9)])
    assert read


def test_further_text_begins_a_new_epoch(target: TrainingTarget, tmp_path: Path) -> None:
    train(target, tmp_path / "head", watch=Watch(stop_after=3))
    more = [*some_texts(), *some_texts(20, seed=9)]
    trainer = trainer_of(target, tmp_path / "head", texts=more)
    trainer.run()
    assert trainer.counters.epoch >= 1
    assert trainer.counters.resumed == 1


def test_what_is_kept_is_measured_again(target: TrainingTarget, tmp_path: Path) -> None:
    """Scores of different held-out text, or of another release, are not compared."""
    train(target, tmp_path / "head", watch=Watch(stop_after=3))
    trainer = trainer_of(target, tmp_path / "head", watch=Watch(stop_after=1))
    trainer.counters.best = 99.0
    trainer.run()
    assert 1.0 <= trainer.counters.best < 4.0


def test_a_head_starts_from_another(target: TrainingTarget, tmp_path: Path) -> None:
    train(target, tmp_path / "old", options=options_of(output_rows=50))
    older = load_head(tmp_path / "old", LinearHead, target.identity)
    trainer = trainer_of(target, tmp_path / "new", start_from=tmp_path / "old")
    newer = trainer._learner.module
    assert newer.config == older.config
    for name, tensor in older.state_dict().items():
        assert torch.equal(newer.state_dict()[name], tensor)
    job = replace(trainer._job, kind_options={"tap": 0})
    with pytest.raises(ConfigError, match="tap is 0 and 2 in the head to start from"):
        Trainer(job, target, trainer._texts, options_of(), Watch())


def test_acceptance_does_not_depend_on_batches(target: TrainingTarget, tmp_path: Path) -> None:
    measured = []
    for batch_tokens in (100, 4000):
        watch, options = Watch(stop_after=1), options_of(batch_tokens=batch_tokens)
        train(target, tmp_path / str(batch_tokens), options=options, watch=watch)
        assert watch.statuses[0].acceptance is not None
        measured.append(watch.statuses[0].acceptance)
    small, large = measured
    assert small.num_anchors == large.num_anchors
    assert small.greedy == pytest.approx(large.greedy)
    assert small.sampled == pytest.approx(large.sampled, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": options_of(output_rows=60)}, "output_rows 100, and now it is 60"),
        ({"kind_options": {"tap": 1}}, "options"),
    ],
)
def test_another_recipe_is_refused(
    target: TrainingTarget, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    train(target, tmp_path / "head", watch=Watch(stop_after=1))
    with pytest.raises(ConfigError, match=message):
        trainer_of(target, tmp_path / "head", **changes)


class PoisonedHead(LinearHead):
    """Its third step says NaN."""

    kind = "poisoned"
    training_file = __name__


class PoisonedTraining(LinearTraining):
    """See `PoisonedHead`."""

    steps = 0

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        found = super().predictions(batch, depth)
        self.steps += self.module.training
        if self.steps < 3:
            return found
        return [Prediction(p.states_BLK * torch.nan, p.output_RK, p.depth) for p in found]


TRAINING = PoisonedTraining


def test_nan_ends_training_and_leaves_the_state(target: TrainingTarget, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the loss is nan .* at step 2"):
        train(target, tmp_path / "head", kind=PoisonedHead, options=options_of(save_s=0))
    assert all(
        t.isfinite().all() for n, t in state_of(tmp_path / "head").items() if "output_ids" not in n
    )
    head = load_head(tmp_path / "head", PoisonedHead, target.identity)
    assert head.output.weight.isfinite().all()


def test_a_full_disk_leaves_what_was_there(
    target: TrainingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(target, tmp_path / "head", watch=Watch(stop_after=2))
    before = state_of(tmp_path / "head")

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(foredraft.system.files, "save_file", full)
    with pytest.raises(TrainingError, match="the disk is full"):
        train(target, tmp_path / "head", watch=Watch(stop_after=2))
    assert_same(before, state_of(tmp_path / "head"))
    assert not list((tmp_path / "head").rglob("*.partial"))
    monkeypatch.undo()
    assert train(target, tmp_path / "head").done >= 1


def test_data_that_cannot_be_used(target: TrainingTarget, tmp_path: Path) -> None:
    texts = some_texts()
    texts[3].tokens[4] = 70_000
    with pytest.raises(ConfigError, match="token 70000 and the target's vocabulary has 300"):
        trainer_of(target, tmp_path / "head", texts=texts)
    with pytest.raises(ConfigError, match="no replies"):
        trainer_of(target, tmp_path / "head", texts=[])
    with pytest.raises(ConfigError, match="1 texts are too few"):
        trainer_of(target, tmp_path / "head", texts=some_texts(1))


def test_of_few_texts_one_prompt_is_held_out(target: TrainingTarget, tmp_path: Path) -> None:
    few = [text for text in some_texts() if not text.is_held_out][:5]
    trained, held_out = split_texts(few)
    assert (len(trained), len(held_out)) == (4, 1)
    assert train(target, tmp_path / "head", texts=few, options=options_of(tokens=500)).done >= 1


def test_layers_that_are_not_there(target: TrainingTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer 7 cannot be tapped"):
        trainer_of(target, tmp_path / "head", kind_options={"tap": 7})


def test_targets_that_cannot_be_trained_on() -> None:
    with pytest.raises(CapabilityError, match="native decoder"):
        TrainingTarget(TableModel(3, lambda tokens: [1.0, 0.0, 0.0]), "table", "")


def test_curves_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    path.write_text(json.dumps({"tokens": 1, "loss": 2.0}) + '\n{"tokens": 2, "lo')
    assert read_curves(path) == [{"tokens": 1, "loss": 2.0}]
