"""Cached files between starts: found again, never trusted when they have changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch

from foredraft.models.base import Target
from foredraft.models.files.kept import KeptFiles, kept_models, recipe_of
from foredraft.models.files.safety import Checkpoint
from foredraft.models.native import weights as weights_module
from foredraft.models.native.config import read_config
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import load_weights
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.models.timing import kept_cost
from tests.models.checkpoints import NATIVE_CONFIGS, need_kernel, save_checkpoint


@pytest.fixture
def kept(cache: Path) -> KeptFiles:
    return KeptFiles(cache / "kept" / "model")


def _model(directory: Path, family: str = "llama") -> Path:
    save_checkpoint(directory, NATIVE_CONFIGS[family]())
    return directory


pytestmark = pytest.mark.usefixtures("cache")

TENSORS = {
    "a": torch.arange(100_000, dtype=torch.float32).view(100, 1000),
    "b": torch.randn(3, 5).bfloat16(),
    "c": torch.arange(7, dtype=torch.uint8),
}


def test_tensors_come_back_as_they_were(kept: KeptFiles) -> None:
    assert kept.tensors("piece", "recipe") is None
    kept.keep("piece", "recipe", TENSORS)
    found = kept.tensors("piece", "recipe")
    assert found is not None
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
        assert found[name].data_ptr() % 64 == 0


@pytest.mark.slow
def test_a_piece_beyond_what_32_bits_count_comes_back_as_it_was(kept: KeptFiles) -> None:
    """3 GB of weights: places in the file and the memory need more than 32 bits."""
    marks = {0: 1, 2**31 - 1: 2, 2**31 + 5: 3, 3 * 2**30 - 1: 4}
    large = torch.zeros(3 * 2**30, dtype=torch.uint8)
    for place, mark in marks.items():
        large[place] = mark
    kept.keep("piece", "recipe", {"large": large, "behind": TENSORS["a"]})
    found = kept.tensors("piece", "recipe")
    assert found is not None
    assert found["large"].shape == large.shape
    assert {place: int(found["large"][place]) for place in marks} == marks
    assert torch.count_nonzero(found["large"]) == len(marks)
    assert torch.equal(found["behind"], TENSORS["a"])


def test_a_form_takes_the_place_of_another_and_is_said(
    kept: KeptFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("foredraft.models.files.kept.LEAST_BYTES", 100_000)
    kept.keep("costs", "recipe", {"c": TENSORS["c"]})
    assert not caplog.messages
    for name in ("weights-4", "weights-8", "weights-8"):
        kept.keep(name, "recipe", TENSORS, instead_of="weights-*")
    assert kept.tensors("weights-4", "recipe") is None
    assert kept.tensors("weights-8", "recipe") is not None
    assert kept.tensors("costs", "recipe") is not None
    assert kept.folder is not None
    assert len([*kept.folder.iterdir()]) == 4
    assert all(str(kept.folder) in message for message in caplog.messages)
    assert len(caplog.messages) == 3


def test_another_recipe_is_not_found(kept: KeptFiles) -> None:
    kept.keep("piece", "recipe", TENSORS)
    assert kept.tensors("piece", "other") is None


@pytest.mark.parametrize("how", ["flipped", "short", "long", "no index", "index", "outside"])
def test_damage_is_found(kept: KeptFiles, how: str) -> None:
    kept.keep("piece", "recipe", TENSORS)
    assert kept.folder is not None
    path, index = kept.folder / "piece", kept.folder / "piece.index"
    content = path.read_bytes()
    if how == "flipped":
        path.write_bytes(content[:1234] + bytes([content[1234] ^ 1]) + content[1235:])
    elif how == "short":
        path.write_bytes(content[:-64])
    elif how == "long":
        path.write_bytes(content + bytes(64))
    elif how == "no index":
        index.unlink()
    elif how == "index":
        index.write_text("{")
    else:
        index.write_text(index.read_text().replace("[100, 1000]", "[1000, 1000]"))
    assert kept.tensors("piece", "recipe") is None


def test_values_are_made_once(kept: KeptFiles) -> None:
    calls: list[int] = []

    def make() -> list[int]:
        calls.append(1)
        return [1, 2]

    assert [kept.json("value", "recipe", make) for _ in range(3)] == [[1, 2]] * 3
    assert len(calls) == 1
    kept.json("value", "other", make)
    assert len(calls) == 2


def test_nothing_fails_where_nothing_can_be_written(kept: KeptFiles, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    kept.keep("piece", "recipe", TENSORS)
    assert kept.tensors("piece", "recipe") is None
    assert kept.json("value", "recipe", lambda: 3) == 3


def test_a_changed_model_is_another_model(tmp_path: Path) -> None:
    _model(tmp_path / "model")
    before = KeptFiles.of(Checkpoint(tmp_path / "model"), least_bytes=0)
    before.keep("piece", "recipe", TENSORS)
    assert KeptFiles.of(Checkpoint(tmp_path / "model"), least_bytes=0) == before
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    after = KeptFiles.of(Checkpoint(tmp_path / "model"), least_bytes=0)
    assert after != before
    assert before.folder is not None
    assert not before.folder.exists(), "what was made of files that are gone is deleted"


def test_what_is_kept_of_a_deleted_model_goes_with_the_next_one(tmp_path: Path) -> None:
    for name in ("deleted", "linked", "first", "second"):
        _model(tmp_path / name)
    weights = tmp_path / "linked" / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    for name in ("deleted", "linked", "first"):
        kept = KeptFiles.of(Checkpoint(tmp_path / name), least_bytes=0)
        kept.keep("piece", "recipe", TENSORS)
    assert {each.model for each in kept_models()} == {
        tmp_path / name for name in ("deleted", "linked", "first")
    }
    assert all(each.num_bytes > 400_000 and not each.is_gone for each in kept_models())
    shutil.rmtree(tmp_path / "deleted")
    (tmp_path / "elsewhere").unlink()
    assert [each.is_gone for each in kept_models()].count(True) == 2
    KeptFiles.of(Checkpoint(tmp_path / "second"), least_bytes=0).keep_json("costs", "recipe", 3)
    left = {each.model for each in kept_models()}
    assert left == {tmp_path / "first", tmp_path / "second"}


def test_pieces_that_no_version_has_used_for_long_go_with_the_next_one(
    kept: KeptFiles, cache: Path
) -> None:
    kept.keep("used", "recipe", TENSORS)
    kept.keep_json("costs", "recipe", 3)
    kept.keep("unused", "recipe", TENSORS)
    (cache / "weights" / "a-user's").mkdir(parents=True)
    (cache / "weights" / "a-user's" / "model.safetensors").touch()
    (cache / "weights" / f"{'0af9' * 8}.json").write_text("{}")  # of an old version
    for path in cache.rglob("*"):
        os.utime(path, (0, 0))
    assert kept.tensors("used", "recipe") is not None
    assert kept.read_json("costs", "recipe") == 3
    kept.keep("new", "recipe", TENSORS)
    left = {path.name for path in cache.rglob("*") if path.is_file()}
    assert left == {*("used", "used.index", "costs.json", "new", "new.index"), "model.safetensors"}
    assert not (cache / "kept" / "model" / "used").stat().st_mtime, "only its index is written to"


def test_a_piece_is_kept_while_another_process_deletes_a_folder(
    kept: KeptFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "kept" / "gone" / "version").mkdir(parents=True)
    scandir = os.scandir

    def delete_first(folder: os.PathLike[str] | str) -> object:
        if str(folder).endswith("gone"):
            shutil.rmtree(cache / "kept" / "gone")
            raise FileNotFoundError(folder)
        return scandir(folder)

    kept.keep_json("costs", "recipe", 3)
    monkeypatch.setattr(os, "scandir", delete_first)
    kept.keep("piece", "recipe", TENSORS)
    monkeypatch.undo()
    assert kept.tensors("piece", "recipe") is not None


def test_small_models_keep_nothing(tmp_path: Path) -> None:
    _model(tmp_path / "model")
    assert KeptFiles.of(Checkpoint(tmp_path / "model")).folder is None


def test_weights_that_are_not_laid_out_anew_are_not_kept(tmp_path: Path) -> None:
    directory = _model(tmp_path / "model")
    folder = KeptFiles(tmp_path / "kept")
    load_weights(directory, read_config(directory), torch.bfloat16, kept=folder)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("bits", [8, 4, 16])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "nemotron-h-moe"])
def test_kept_weights_are_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, bits: int
) -> None:
    need_kernel()
    directory = _model(tmp_path / "model", family)
    config = read_config(directory)
    plain = load_weights(directory, config, torch.bfloat16, bits=bits)
    folder = KeptFiles(tmp_path / "kept")
    made = load_weights(directory, config, torch.bfloat16, bits=bits, kept=folder)
    monkeypatch.setattr(weights_module, "read_tensor", None)  # nothing is read from the checkpoint
    monkeypatch.setattr(weights_module, "fit", lambda checkpoint, config: (config, frozenset()))
    kept = load_weights(directory, config, torch.bfloat16, bits=bits, kept=folder)
    found = (weights.tensors() for weights in (plain, made, kept))
    for (name, one), *others in zip(*(each.items() for each in found), strict=True):
        assert all(name == same and torch.equal(one, other) for same, other in others)
    assert (kept.head_VE is kept.embedding_VE) == (plain.head_VE is plain.embedding_VE)


MEASURED = (((1, 10.0), (4, 12.0)), (0.001, 0.0001), 64)


def _measuring(monkeypatch: pytest.MonkeyPatch, *scales: float) -> list[float]:
    """Let the next measurements take so many times as long; returns those that are left."""
    left = [*scales]

    def measure(target: object, max_rows: int) -> object:
        times, attention, context = MEASURED
        scale = left.pop(0)
        return tuple((size, scale * ms) for size, ms in times), attention, context

    monkeypatch.setattr("foredraft.models.timing._measure", measure)
    return left


def test_the_least_of_two_processes_is_kept(
    kept: KeptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = cast(Target, None)
    left = _measuring(monkeypatch, 2.0, 1.0)
    found = [kept_cost(kept, "here", target).ms([(1, 64)]) for _ in range(4)]
    assert found == pytest.approx([20.0, 10.0, 10.0, 10.0])
    assert not left
    with pytest.raises(IndexError):
        kept_cost(kept, "elsewhere", target)


def test_costs_of_another_week_take_the_place_of_those_before(
    kept: KeptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = cast(Target, None)
    _measuring(monkeypatch, 1.0, 3.0)
    kept_cost(kept, "here", target)
    monkeypatch.setattr("time.time", lambda: 1e10)
    assert kept_cost(kept, "here", target).ms([(1, 64)]) == pytest.approx(30.0)
    assert kept.folder is not None
    assert len(list(kept.folder.glob("costs-*"))) == 1


def test_the_costs_of_a_target_are_measured(tmp_path: Path, kept: KeptFiles) -> None:
    target = NativeTarget.load(_model(tmp_path / "model"))
    assert kept_cost(kept, "here", target).ms([(1, 7)]) > 0


def test_recipes_differ_with_code_and_values() -> None:
    assert recipe_of(weights_module, 1) == recipe_of(weights_module, 1)
    assert recipe_of(weights_module, 1) != recipe_of(weights_module, 2)
    assert recipe_of(pytest, 1) != recipe_of(weights_module, 1)


def test_the_fingerprint_of_a_large_vocabulary_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _model(tmp_path / "model")
    fingerprint = Tokenizer(directory).fingerprint
    monkeypatch.setattr("foredraft.models.text.tokenizer._LARGE_BYTES", 1)
    assert Tokenizer(directory).fingerprint == fingerprint
    monkeypatch.setattr(Tokenizer, "_vocabulary_hash", None)
    assert Tokenizer(directory).fingerprint == fingerprint


def test_tensors_in_a_recipe_count_by_their_bytes() -> None:
    tensor = torch.randn(3, 4)
    assert recipe_of(tensor) == recipe_of(tensor.clone())
    assert recipe_of(tensor) != recipe_of(tensor + 1)
    assert recipe_of(tensor) != recipe_of(tensor.view(4, 3))


def test_a_target_keeps_what_drafters_make_of_it(
    tmp_path: Path, kept: KeptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _model(tmp_path / "model")
    monkeypatch.setattr(KeptFiles, "of", lambda checkpoint: kept)
    made = torch.randn(3, 4)
    target = NativeTarget.load(directory)
    assert torch.equal(target.parts.kept("table", "recipe", lambda: made), made)
    again = NativeTarget.load(directory)
    assert torch.equal(again.parts.kept("table", "recipe", lambda: made + 1), made)
    assert torch.equal(again.parts.kept("table", "other", lambda: made + 1), made + 1)
