"""Checkpoints that must be refused before anything of them is loaded."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.safety import Checkpoint, check_safetensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that passes; every test breaks one thing about it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_index(directory: Path, **weight_map: Any) -> None:
    """Make the checkpoint a sharded one, of which the file a.safetensors is there."""
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def write_raw(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int, stop: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_a_whole_checkpoint_passes(checkpoint: Path) -> None:
    Checkpoint(checkpoint)


def test_a_sharded_checkpoint_passes(checkpoint: Path) -> None:
    write_index(checkpoint, a="a.safetensors", b="a.safetensors")
    tensors = Checkpoint(checkpoint).tensors
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (5,)),
    }


def test_links_out_of_the_directory_pass_as_the_hub_cache_is_made_of_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    weights = checkpoint / "model.safetensors"
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    Checkpoint(checkpoint)


def test_one_file_that_holds_everything_goes_before_an_index_as_with_transformers(
    checkpoint: Path,
) -> None:
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    assert Checkpoint(checkpoint).tensors.keys() == {"a", "b"}


def test_pickles_beside_safetensors_are_let_be(checkpoint: Path) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(b"never opened")
    Checkpoint(checkpoint)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_unreadable_config(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json (cannot be read|holds a)"):
        Checkpoint(checkpoint)


@pytest.mark.parametrize("model_type", [{}, {"model_type": "own"}, {"model_type": ["llama"]}])
def test_remote_code_is_refused_and_named(checkpoint: Path, model_type: dict[str, Any]) -> None:
    content = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}} | model_type
    (checkpoint / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"modeling_own\.Own.*never runs code"):
        Checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a.pt", "a.pth", "a.ckpt", "a.pkl"])
def test_pickle_only(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    with pytest.raises(ModelLoadError, match=f"pickle-only \\({name}\\).*can run code.*convert"):
        Checkpoint(checkpoint)


@pytest.mark.parametrize("with_config", [True, False])
def test_a_gguf_file_beside_is_named(checkpoint: Path, with_config: bool) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model.gguf")
    if not with_config:
        (checkpoint / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"name it as the model \(model\.gguf\)"):
        Checkpoint(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "pytorch_model.bin",
        "..",
        "",
    ],
)
def test_a_shard_must_be_a_safetensors_file_of_the_directory(checkpoint: Path, name: Any) -> None:
    write_index(checkpoint, a=name)
    with pytest.raises(ModelLoadError, match="not a safetensors file of its own directory"):
        Checkpoint(checkpoint)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}'],
)
def test_a_useless_index(checkpoint: Path, content: str) -> None:
    write_index(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        Checkpoint(checkpoint)


def test_a_file_cut_anywhere_is_found(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match="truncated or damaged"):
            Checkpoint(checkpoint)


def rename_weights(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory / name)


def append_a_byte(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


def damage_a_shard(directory: Path) -> None:
    (directory / "b.safetensors").write_bytes(b"<html>not found</html>")
    write_index(directory, a="a.safetensors", b="b.safetensors")


def hold_a_tensor_twice(directory: Path) -> None:
    write_index(directory, a="a.safetensors", b="b.safetensors")
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, directory / "b.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "no such directory"),
    "no config": (lambda d: (d / "config.json").unlink(), r"has no config\.json"),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        r"has neither model\.safetensors nor",
    ),
    "a file that nothing names": (
        lambda d: rename_weights(d, "half.safetensors"),
        r"has neither model\.safetensors nor",
    ),
    "missing shards": (
        lambda d: write_index(d, a="a.safetensors", b="b.safetensors", c="c.safetensors"),
        r"lacks 2 of the 3 .*b\.safetensors, c\.safetensors",
    ),
    "something behind a file": (append_a_byte, "truncated or damaged"),
    "a damaged shard": (damage_a_shard, r"b\.safetensors is truncated or damaged"),
    "an index that is wrong about a tensor": (
        lambda d: write_index(d, a="a.safetensors", c="a.safetensors"),
        r"says that 'c' is in a\.safetensors, and it is not",
    ),
    "a tensor in two files": (hold_a_tensor_twice, "which one is meant cannot be known"),
    "a config that names weight files of its own": (
        lambda d: (d / "config.json").write_text('{"transformers_weights": "other.safetensors"}'),
        r"transformers_weights \('other\.safetensors'\)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_by_name(checkpoint: Path, name: str) -> None:
    breaks, message = BROKEN[name]
    breaks(checkpoint)
    with pytest.raises(ModelLoadError, match=message):
        Checkpoint(checkpoint)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        {"a": 3},
        {"a": entry(0, 4, [5])},  # the shape wants another number of bytes
        {"a": entry(1, 4, [3])},  # a gap before the first
        {"a": entry(0, 4, [4]), "b": entry(2, 4, [2])},  # one over the other
        {"a": entry(0, 8, [8])},  # behind the end of the file
        {"a": entry(-4, 0, [4])},
        {},  # four bytes that nothing describes
    ],
)
def test_a_header_that_does_not_describe_the_data(tmp_path: Path, header: Any) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, b"1234")
    with pytest.raises(ModelLoadError, match="truncated or damaged"):
        check_safetensors(path)


def test_headers_that_are_right(tmp_path: Path) -> None:
    empty_and_full = {"b": entry(0, 4, [2, 2]), "a": entry(0, 0, [0, 7]), "c": entry(4, 4, [0])}
    check_safetensors(write_raw(tmp_path / "x.safetensors", empty_and_full, b"1234"))
    scalar_and_narrow = {"a": entry(0, 2, [], "BF16"), "b": entry(2, 4, [2, 2], "F4")}
    check_safetensors(write_raw(tmp_path / "y.safetensors", scalar_and_narrow, b"1234"))
