"""FLAN-T5 from a package: ONNX files are read, and their numbers get the names of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import flan_t5
from benchmarks.flan_t5 import Array, OnnxFile
from foredraft import LLM, SamplingParams


def field(number: int, value: int | bytes) -> bytes:
    """A protobuf field."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def tensor(name: str, values: Array) -> bytes:
    """An initialiser: scalars field by field, as onnxruntime writes them, others in bytes."""
    kind = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7}[values.dtype.name]
    dims = b"".join(field(1, size) for size in values.shape)
    if values.shape:
        content = field(9, values.tobytes())
    elif kind == 1:
        content = field(4, values.tobytes())
    else:
        content = field(5, int(values))
    return field(5, dims + field(2, kind) + content + field(8, name.encode()))


def quantised(name: str, values: Array, scale: float, zero: int) -> bytes:
    return (
        tensor(f"{name}_quantized", values)
        + tensor(f"{name}_scale", np.array(scale, np.float32))
        + tensor(f"{name}_zero_point", np.array(zero, values.dtype))
    )


def node(name: str, *inputs: str) -> bytes:
    return field(1, b"".join(field(1, each.encode()) for each in inputs) + field(3, name.encode()))


NORM = np.arange(4, dtype=np.float32)
EMBEDDING = np.arange(12, dtype=np.uint8).reshape(3, 4)
MATRIX = np.arange(-4, 4, dtype=np.int8).reshape(4, 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    graph = (
        tensor("m.decoder.block.0.layer.0.layer_norm.weight", NORM)
        + tensor("shape", np.array([3], np.int64))
        + quantised("m.shared.weight", EMBEDDING, 0.5, 7)
        + quantised("onnx::MatMul_3", MATRIX, 2.0, -1)
        + node("/m/decoder/block.0/layer.0/SelfAttention/q/Transpose", "a")
        + node(
            "/m/decoder/block.0/layer.0/SelfAttention/q/MatMul_quant",
            "x",
            "onnx::MatMul_3_quantized",
        )
    )
    path = tmp_path / "decoder.onnx"
    path.write_bytes(field(1, 8) + field(2, b"a test") + field(7, graph))
    return path


def test_weights_get_their_values_and_names(file: Path) -> None:
    found = dict(flan_t5._weights(OnnxFile.read(file)))
    wanted = {
        "decoder.block.0.layer.0.layer_norm.weight": NORM,
        "shared.weight": (EMBEDDING.astype(np.float32) - 7) * 0.5,
        "decoder.block.0.layer.0.SelfAttention.q.weight": (MATRIX.T.astype(np.float32) + 1) * 2.0,
    }
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == np.float32
        assert found[name].flags.c_contiguous
        np.testing.assert_array_equal(found[name], values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fetched once (68 MB)."""
    return flan_t5.write_model(tmp_path_factory.mktemp("flan-t5"))


@pytest.mark.slow
def test_the_real_model_writes_titles(model: Path) -> None:
    """The titles are those of transformers on the same weights."""
    llm = LLM.load(model, drafter="prediction", num_draft_tokens=6, calibrate=False)
    theirs, steps = llm.target.model, 0  # type: ignore[attr-defined]
    assert theirs.lm_head.weight.data_ptr() != theirs.shared.weight.data_ptr()
    for prompt, title in TITLES.items():
        (result,) = llm.generate(prompt, SamplingParams(max_tokens=40))
        ids = torch.tensor([llm.encode(prompt)])
        out = theirs.generate(ids, max_new_tokens=40, do_sample=False)
        assert list(result.token_ids) == out[0, 1:].tolist()
        assert result.text == title
        steps += result.stats.steps
    assert steps < 0.6 * 18


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("mode", ["slem", "tli"])
def test_smollm2_drafts_for_it_in_another_vocabulary(model: Path, mode: str) -> None:
    plain = LLM.load(model, drafter="none", calibrate=False)
    llm = LLM.load(
        model,
        drafter="cross_tokenizer",
        draft_model="smollm2-135m-instruct",
        drafter_options={"mode": mode},
        num_draft_tokens=4,
        calibrate=False,
    )
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=32, temperature=temperature, seed=3)
        wanted = plain.generate([*TITLES], params)
        got = llm.generate([*TITLES], params)
        assert [r.token_ids for r in got] == [r.token_ids for r in wanted]
        assert sum(r.stats.accepted for r in got) > 0
    assert not llm.policy.num_faults


TITLES = {
    "Fix the failing login test in auth/session.py: the token refresh raises KeyError when the "
    "user has no profile.": "Fix authentication failure in auth/session.py",
    "Please add a dark mode toggle to the settings page and store the choice in local storage.": (
        "Add dark mode toggle storage"
    ),
}
