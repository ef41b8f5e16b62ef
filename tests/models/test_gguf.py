"""GGUF files: read as the format's own package reads them, or refused with a sentence."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from foredraft.core.errors import ModelLoadError
from foredraft.models.files import gguf as reader
from foredraft.models.files.gguf import GgufFile
from foredraft.models.files.gguf_blocks import KINDS
from tests.models.gguf_files import ARRAY, STRING, Stored, Typed, gguf_bytes, text, write_gguf

CODES = {kind.name: code for code, kind in KINDS.items()}
FLOAT_ROW = np.arange(8, dtype="<f4").tobytes()
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "u8": Typed(0, 200),
    "i8": Typed(1, -100),
    "u16": Typed(2, 60_000),
    "i16": Typed(3, -30_000),
    "u32": Typed(4, 4_000_000_000),
    "i32": Typed(5, -2_000_000_000),
    "f32": Typed(6, 0.5),
    "yes": True,
    "u64": Typed(10, 2**63),
    "i64": Typed(11, -(2**62)),
    "f64": Typed(12, 0.1),
    "texts": ["a", "é 東", ""],
    "numbers": [3, 1, -2],
    "halves": Typed(ARRAY, [0.5, 1.5], 6),
    "flags": Typed(ARRAY, [True, False], 7),
    "none": Typed(ARRAY, [], STRING),
}
TENSORS = [
    ("matrix", Stored(CODES["F32"], (4, 2), FLOAT_ROW)),
    ("small", Stored(CODES["Q8_0"], (32,), bytes(range(34)))),
    ("nested", Stored(CODES["Q4_K"], (256,), bytes(144))),
]


# ---------------------------------------------------------------------------------------- header


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_metadata_is_read(tmp_path: Path, version: int) -> None:
    file = GgufFile(write_gguf(tmp_path / "a.gguf", METADATA, TENSORS, version=version))
    assert list(file.metadata) == list(METADATA)
    for key, value in METADATA.items():
        expected = value.value if isinstance(value, Typed) else value
        found = file.metadata[key]
        found = found.tolist() if isinstance(found, np.ndarray) else found
        assert found == expected, key
        assert type(found) is type(expected), key


def test_tensors_have_their_shapes_and_bytes(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, TENSORS))
    assert list(file.tensors) == ["matrix", "small", "nested"]
    matrix = file.weights(file.tensors["matrix"])
    assert matrix.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert file.blocks(file.tensors["small"]).tolist() == [[*range(34)]]
    assert file.tensors["nested"].num_bytes == 144
    assert file.weights(file.tensors["nested"]).shape == (256,)


@pytest.mark.parametrize("alignment", [1, 8, 256])
def test_an_alignment_of_its_own_is_kept(tmp_path: Path, alignment: int) -> None:
    metadata = {"general.alignment": alignment}
    path = write_gguf(tmp_path / "a.gguf", metadata, TENSORS, alignment=alignment)
    file = GgufFile(path)
    assert file.blocks(file.tensors["small"]).tobytes() == bytes(range(34))


def test_a_file_of_the_formats_own_package_is_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 3])
    weights = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q5_1):
        writer.add_tensor(kind.name, gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.metadata["llama.context_length"] == 77
    assert ours.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert ours.metadata["tokenizer.ggml.token_type"].tolist() == [1, 3]
    for expected in theirs.tensors:
        tensor = ours.tensors[expected.name]
        assert tensor.start == expected.data_offset
        values = gguf.dequantize(expected.data, expected.tensor_type)
        assert np.array_equal(ours.weights(tensor), values)


# --------------------------------------------------------------------------------------- refusals

ROW = Stored(CODES["F32"], (8,), FLOAT_ROW)
HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as GGUF"),
        (b"\x80\x02}q\x00", r"begins with .* and not with b'GGUF'"),
        (gguf_bytes({}, version=1), "version 1 is not read, only 2 and 3"),
        (gguf_bytes({}, version=3 << 24), "big-endian"),
        (gguf_bytes({}, num_tensors=HUGE), "claims 18446744073709551615 tensors"),
        (gguf_bytes({}, num_entries=1 << 17), "claims 131072 metadata entries"),
        (gguf_bytes({"a": "bb"}).replace(b"bb", b"\xff\xfe"), "no UTF-8"),
        (gguf_bytes({"a": 1}).replace(b"\4\0\0\0\1", b"\x0d\0\0\0\1"), "13 is no type"),
        (gguf_bytes({"a": True}).replace(b"\7\0\0\0\1", b"\7\0\0\0\2"), "2 is no truth value"),
        (gguf_bytes({"a": Typed(ARRAY, [1], 4, HUGE)}), "bytes should follow"),
        (gguf_bytes({"a": Typed(ARRAY, [], ARRAY, 1)}), "9 is no type"),
        (gguf_bytes({"a": 1, "b": 2}).replace(text("b"), text("a")), "'a' is there twice"),
        (gguf_bytes({"general.alignment": 24}), "alignment is 24"),
        (gguf_bytes({}, [("t", ROW), ("t", ROW)]), "the same name"),
        (gguf_bytes({}, [("t", Stored(0, (), b""))]), "has 0 dimensions"),
        (gguf_bytes({}, [("t", Stored(0, (HUGE,) * 4, FLOAT_ROW))]), "should fill bytes"),
        (gguf_bytes({}, [("t", Stored(CODES["Q4_K"], (128,), bytes(99)))]), "blocks of 256"),
        (gguf_bytes({}, [("t", ROW), ("u", Stored(0, (8,), FLOAT_ROW, 0))]), "before it ends"),
        (gguf_bytes({}, [("t", Stored(0, (7,), FLOAT_ROW, 4))]), "multiples of 32"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as refused:
        GgufFile(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("kind", [k for k in gguf.GGMLQuantizationType if k not in KINDS])
def test_other_formats_are_refused_by_name(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    path = write_gguf(tmp_path / "a.gguf", {}, [("t", Stored(int(kind), (256,), bytes(512)))])
    with pytest.raises(ModelLoadError, match=rf"'t' is stored as {kind.name}.*such as a Q8_0"):
        GgufFile(path)


def test_a_header_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_HEADER_BYTES", 100)
    path = write_gguf(tmp_path / "a.gguf", {"a": Typed(ARRAY, [0] * 200, 0)})
    with pytest.raises(ModelLoadError, match="largest header read ends at byte 100"):
        GgufFile(path)


# --------------------------------------------------------------------------------------- mutations

VALID = gguf_bytes(METADATA, TENSORS)
HEADER = len(VALID) - 32 - 64 - 144
MOST_BYTES = 256 << 10
"""Traced while a mutated file of some 1000 bytes is read and all of its tensors are taken."""
EDGES = (0, 1, 7, 8, 9, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, HUGE)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], bool]]:
    """Whether a content is read. Refusing it without a sentence fails, and so does much memory."""

    def reads_or_says_why(content: bytes) -> bool:
        # Writing ten thousand files takes minutes.
        monkeypatch.setattr(reader, "_mapped", lambda path: content)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        reason = _reason_of_refusal()
        assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES
        assert len(reason) < 1000
        reason.encode()  # it can be printed
        return not reason

    tracemalloc.start()
    yield reads_or_says_why
    tracemalloc.stop()


def _reason_of_refusal() -> str:
    try:
        file = GgufFile(Path("mutated.gguf"))
        for tensor in file.tensors.values():
            assert file.weights(tensor).shape == tensor.shape
    except ModelLoadError as error:
        return str(error)
    return ""


def mutated(draw: random.Random, valid: bytes = VALID, header: int = HEADER) -> bytes:
    """One to three changes: a byte, a number in place of 4 or 8 bytes, a cut, or bytes put in."""
    content = bytearray(valid)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(header if draw.random() < 0.9 else len(content))
        place = min(place, len(content) - 1)
        match draw.randrange(6):
            case 0 | 1:
                content[place] = draw.randrange(256)
            case 2:
                content[place : place + 8] = struct.pack("<Q", draw.choice(EDGES))
            case 3:
                content[place : place + 4] = struct.pack("<I", draw.choice(EDGES) % 2**32)
            case 4:
                del content[place : place + draw.randint(1, 9)]
            case 5:
                content[place:place] = draw.randbytes(draw.randint(1, 9))
    return bytes(content)


def test_ten_thousand_mutated_files_are_read_or_refused(reads: Callable[[bytes], bool]) -> None:
    draw = random.Random(1)
    num_read = sum(reads(mutated(draw)) for _ in range(10_000))
    assert 500 < num_read < 9500  # both happen


def test_a_file_that_was_cut_short_is_refused(reads: Callable[[bytes], bool]) -> None:
    assert reads(VALID)
    assert not any(reads(VALID[:length]) for length in range(len(VALID)))


# ------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("code", [code for code in KINDS if code])
def test_numbers_are_those_of_the_formats_own_package(code: int) -> None:
    kind, draw = KINDS[code], np.random.default_rng(code)
    blocks = draw.integers(0, 256, (5, 40, kind.block_bytes), np.uint8)
    ours = kind.dequantise(blocks).reshape(5, -1)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(blocks.reshape(5, -1), gguf.GGMLQuantizationType(code))
    assert ours.dtype == theirs.dtype == np.float32
    assert np.isfinite(theirs).mean() > 0.5
    assert np.array_equal(ours, theirs, equal_nan=True)
