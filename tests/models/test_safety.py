"""Checkpoints that must be refused before anything of them is loaded."""

from __future__ import annotations

import json
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


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such directory"):
        Checkpoint(tmp_path / "nowhere")


def rename(name: str, other: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).rename(directory / other)


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    encoded = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(encoded)


def index_of(content: bytes | None = None, **weight_map: Any) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        write_index(directory, **weight_map)
        if content is not None:
            (directory / "model.safetensors.index.json").write_bytes(content)

    return damage


def of_two_shards(content: bytes | None) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        write_index(directory, a="a.safetensors", b="b.safetensors")
        path = directory / "b.safetensors"
        if content is None:
            save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, path)
        else:
            path.write_bytes(content)

    return damage


def without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def gguf_without_config(directory: Path) -> None:
    rename(WEIGHTS, "model.gguf")(directory)
    without_config(directory)


def longer(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes() + b"\0")


WEIGHTS = "model.safetensors"
CODE = json.dumps({"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}})
MISSING_SHARDS = {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}
OTHER_FILES = (
    *("../other/model.safetensors", "/etc/model.safetensors", "sub/model.safetensors"),
    *("..\\model.safetensors", "pytorch_model.bin", "..", ""),
)
NO_INDICES = (b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename(WEIGHTS, "half.safetensors"), r"half\.safetensors.*is not guessed"),
        (without_config, r"has no config\.json"),
        *(
            (write("config.json", content), r"config\.json (cannot be read|holds a)")
            for content in (b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000)
        ),
        *(
            (write(name, CODE), r"modeling_own\.Own.*never runs code")
            for name in ("config.json", "tokenizer_config.json")
        ),
        *(
            (rename(WEIGHTS, name), f"pickle-only \\({name}\\).*can run code.*convert")
            for name in ("pytorch_model.bin", "a.pt", "a.pth", "a.ckpt", "a.pkl")
        ),
        (lambda directory: (directory / WEIGHTS).unlink(), "has no weights"),
        (rename(WEIGHTS, "model.gguf"), r"name it as the model \(model\.gguf\)"),
        (gguf_without_config, r"name it as the model \(model\.gguf\)"),
        (index_of(**MISSING_SHARDS), r"lacks 2 of the 3 .*b\.safetensors, c\.safetensors"),
        *(
            (index_of(a=name), "not a safetensors file of its own directory")
            for name in OTHER_FILES
        ),
        *((index_of(content), r"index\.json") for content in NO_INDICES),
        (index_of(a=3), r"index\.json"),
        (longer, "should have"),
        (of_two_shards(b"<html>not found</html>"), r"b\.safetensors is truncated or damaged"),
        (
            index_of(a="a.safetensors", c="a.safetensors"),
            r"says that 'c' is in a\.safetensors, and it is not",
        ),
        (of_two_shards(None), "which one is meant cannot be known"),
        (
            write("config.json", '{"transformers_weights": "other.safetensors"}'),
            r"transformers_weights \('other\.safetensors'\)",
        ),
    ],
)
def test_what_cannot_be_read_safely_is_refused_by_name(
    checkpoint: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(ModelLoadError, match=message):
        Checkpoint(checkpoint)


def test_a_file_cut_anywhere_is_found(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match="truncated or damaged"):
            Checkpoint(checkpoint)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[]",
        b"\xff\xff",
        {"a": 3},
        {"a": {"dtype": "U8", "shape": [4]}},
        {"a": entry(0, 4, [5])},  # the shape wants another number of bytes
        {"a": entry(0, 4, [4], "F32")},  # so does the type
        {"a": entry(1, 4, [3])},  # a gap before the first
        {"a": entry(0, 2, [2]), "b": entry(3, 4, [1])},  # a gap between two
        {"a": entry(0, 4, [4]), "b": entry(2, 4, [2])},  # one over the other
        {"a": entry(0, 8, [8])},  # behind the end of the file
        {"a": entry(4, 0, [4])},
        {"a": entry(-4, 0, [4])},
        {"a": entry(0, 4, [-4, -1])},
        {"a": entry(0, True, [1])},
        {"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}},
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}},
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": ["0", "4"]}},
        {},  # four bytes that nothing describes
    ],
)
def test_a_header_that_does_not_describe_the_data(tmp_path: Path, header: Any) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, b"1234")
    with pytest.raises(ModelLoadError, match="truncated or damaged"):
        check_safetensors(path)


def test_a_header_length_beyond_the_file_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(ModelLoadError, match="a header of 9223372036854775808"):
        check_safetensors(path)


def test_headers_that_are_right(tmp_path: Path) -> None:
    empty_and_full = {"b": entry(0, 4, [2, 2]), "a": entry(0, 0, [0, 7]), "c": entry(4, 4, [0])}
    check_safetensors(write_raw(tmp_path / "x.safetensors", empty_and_full, b"1234"))
    scalar_and_narrow = {"a": entry(0, 2, [], "BF16"), "b": entry(2, 4, [2, 2], "F4")}
    check_safetensors(write_raw(tmp_path / "y.safetensors", scalar_and_narrow, b"1234"))
    of_tomorrow = {"a": entry(0, 4, [9], "F3_NEW")}
    check_safetensors(write_raw(tmp_path / "z.safetensors", of_tomorrow, b"1234"))
