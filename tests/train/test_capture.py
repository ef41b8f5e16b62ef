"""States of a target are never taken for those of another, and may be captured by two at once."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.core.errors import ConfigError
from foredraft.models.files.digest import weights_digest
from foredraft.models.files.safety import Checkpoint
from foredraft.system.files import write_tensors
from foredraft.train import capture as captures
from foredraft.train.capture import Capture
from foredraft.train.target import TrainingTarget
from foredraft.train.writing import check_origin
from tests.train.helpers import (
    Watch,
    counted_reads,
    options_of,
    some_texts,
    train,
    trainer_of,
    training_target,
)


@pytest.fixture
def fine_tuned(checkpoint: Path, tmp_path: Path) -> Path:
    """The same embeddings, and one other matrix."""
    shutil.copytree(checkpoint, tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, file, {"format": "pt"})
    return tmp_path / "tuned"


def test_a_fine_tune_has_captures_of_its_own(
    target: TrainingTarget, fine_tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = training_target(fine_tuned, "tuned")
    assert other.identity.fingerprint == target.identity.fingerprint  # embeddings do not tell
    train(target, tmp_path / "one")
    read = counted_reads(monkeypatch)
    train(other, tmp_path / "two")
    assert sum(read) == len(some_texts())


def test_captures_that_no_version_has_used_for_long_go_with_the_next_ones(
    target: TrainingTarget, tmp_path: Path
) -> None:
    """Those of another version's forwards would never be found again."""
    root = tmp_path / "captures"
    for name, used in (("old", 0.0), ("used", time.time()), ("holiday", 0.0)):
        (root / "another" / name).mkdir(parents=True)
        file = "film.mp4" if name == "holiday" else "layer-000.safetensors"
        (root / "another" / name / file).touch()
        os.utime(root / "another" / name, (used, used))
    Capture(target, some_texts(), [0], root, math.inf).fill(Watch())
    assert {path.name for path in (root / "another").iterdir()} == {"used", "holiday"}


def test_captures_are_of_one_type_of_numbers(target: TrainingTarget, checkpoint: Path) -> None:
    half = training_target(checkpoint, dtype=torch.bfloat16)
    assert half.identity == target.identity
    assert half.forward_key != target.forward_key


def test_text_of_a_fine_tune_is_refused(
    target: TrainingTarget, fine_tuned: Path, tmp_path: Path
) -> None:
    other = training_target(fine_tuned, "tuned")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "texts.json").write_text(json.dumps(vars(target.identity)))
    check_origin(tmp_path / "texts", target.identity)
    with pytest.raises(ConfigError, match=r"text of 'tiny' \(weights .* the target is 'tuned'"):
        check_origin(tmp_path / "texts", other.identity)


def test_the_digest_is_of_tensors_and_not_of_files(checkpoint: Path, tmp_path: Path) -> None:
    whole = weights_digest(Checkpoint(checkpoint))
    shutil.copytree(checkpoint, tmp_path / "parts")
    tensors = load_file(tmp_path / "parts" / "model.safetensors")
    (tmp_path / "parts" / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for part, chosen in (("a", names[:3]), ("b", names[3:])):
        save_file(
            {name: tensors[name] for name in chosen}, tmp_path / "parts" / f"{part}.safetensors"
        )
        weight_map |= dict.fromkeys(chosen, f"{part}.safetensors")
    index = tmp_path / "parts" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert weights_digest(Checkpoint(tmp_path / "parts")) == whole
    tensors[names[0]][0] += 1
    save_file({n: tensors[n] for n in names[:3]}, tmp_path / "parts" / "a.safetensors")
    assert weights_digest(Checkpoint(tmp_path / "parts")) != whole


def test_two_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(write_tensors, path, {"states": torch.ones(1000)}) for _ in range(80)]
    for write in writes:
        write.result()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert torch.equal(load_file(path)["states"], torch.ones(1000))


def test_what_a_kill_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    import os

    old, new = tmp_path / ".a.safetensors.1.partial", tmp_path / ".a.safetensors.2.partial"
    for path in (old, new):
        path.write_bytes(b"some of it")
    os.utime(old, (1, 1))
    write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(1)})
    assert not old.exists()
    assert new.exists()


class StopsWhileReading(Watch):
    """Wants to stop when some of the text has been read."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after, self.advanced = after, 0

    def advance(self, fraction: float) -> None:
        self.advanced += 1

    def wants_stop(self) -> bool:
        return self.advanced >= self._after


def test_a_stop_is_heeded_while_text_is_read(
    target: TrainingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "CHUNK_TOKENS", 1000)
    monkeypatch.setitem(captures.PACKED_TOKENS, "cpu", 200)
    watch = StopsWhileReading(after=15)
    trainer = trainer_of(target, tmp_path / "head", watch=watch)
    result = trainer.run()
    assert watch.advanced == 15  # the forward at hand is the last one
    assert (result.done, result.tokens) == (0.0, 0)
    assert 0 < len(trainer._capture.captured) < len(some_texts())
    assert train(target, tmp_path / "head").done >= 1


def test_few_minutes_read_some_of_the_text_and_learn_from_that(
    target: TrainingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "CHUNK_TOKENS", 1000)
    whole = Capture.fill
    monkeypatch.setattr(Capture, "fill", lambda self, monitor, seconds: whole(self, monitor, 0.0))
    options = options_of(tokens=2000, minutes=100)
    trainer = trainer_of(target, tmp_path / "head", options=options)
    assert trainer.run().done >= 1
    captured = trainer._capture.captured
    assert 0 < len(captured) < len(some_texts())
    assert {window.text for window in trainer._windows} <= captured
