"""Weights in int8 and in tiles: what rounding does, what is stored, and who may use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.load import ModelPlan, plan_models
from foredraft.models.base import ScoreRow
from foredraft.models.native.config import read_config
from foredraft.models.native.model import (
    DecoderFactory,
    EagerDecoder,
    FixedShapeDecoder,
    head_logits,
)
from foredraft.models.native.quant import (
    INT8,
    SCALE_INPUTS,
    TILES,
    PackedMatrix,
    Shelf,
    as_tensor,
    tensor_of,
)
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import load_weights
from foredraft.options import LoadOptions
from tests.models.checkpoints import made


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plan_of(directory: Path, device: str = "cpu", **options: Any) -> ModelPlan:
    return plan_models(LoadOptions.of(model=str(directory), device=device, **options))[0]


def expected(weight_RK: Tensor) -> Tensor:
    """The definition, one block after another."""
    result = torch.empty_like(weight_RK)
    for row in range(weight_RK.shape[0]):
        for start in range(0, weight_RK.shape[1], SCALE_INPUTS):
            block = weight_RK[row, start : start + SCALE_INPUTS]
            scale = (block.abs().max() / 127).half().float()
            integers = (block / scale).round().clamp(-127, 127)
            result[row, start : start + SCALE_INPUTS] = integers * scale
    return result


@pytest.mark.parametrize(
    ("shape", "num_parts"), [((32, 64), 1), ((50, 45), 1), ((70, 33), 2), ((1030, 32), 1)]
)
def test_each_block_of_a_row_has_a_scale(shape: tuple[int, int], num_parts: int) -> None:
    weight_RK = noise(*shape)
    matrix = INT8.of_weight(weight_RK, num_parts)
    assert matrix.shape == shape
    assert torch.allclose(matrix.dequantised(torch.float32), expected(weight_RK), atol=1e-6)


def test_the_error_is_at_most_about_half_a_step() -> None:
    weight_RK = noise(64, 96)
    blocks = weight_RK.view(64, 3, SCALE_INPUTS)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    error = (INT8.of_weight(weight_RK).dequantised(torch.float32).view_as(blocks) - blocks).abs()
    assert (error <= 0.76 * step).all()  # half, and a quarter where a scale was rounded down


def test_zeros_and_outliers_do_not_spoil_their_neighbours() -> None:
    weight_RK = noise(16, 96)
    weight_RK[3, :32], weight_RK[5, 40] = 0.0, 1000.0
    found = INT8.of_weight(weight_RK).dequantised(torch.float32)
    assert (found[3, :32] == 0).all()
    clean = INT8.of_weight(noise(16, 96)).dequantised(torch.float32)
    assert torch.equal(found[5, :32], clean[5, :32])
    assert torch.equal(found[6], clean[6])


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_loading_quantises_all_matrices_but_the_embeddings(name: str) -> None:
    config = read_config(made(name))
    plain = load_weights(made(name), config, torch.bfloat16)
    int8 = load_weights(made(name), config, torch.bfloat16, bits=8)
    assert torch.equal(int8.embedding_VE, plain.embedding_VE)
    assert isinstance(int8.head_VE, PackedMatrix)
    assert int8.head_VE.form is INT8
    pairs = [(int8.head_VE, plain.head_VE)]
    for found, original in zip(int8.layers, plain.layers, strict=True):
        assert torch.equal(found.mlp_norm_E, original.mlp_norm_E)
        for kind in ("qkv_weight", "output_weight", "gate_up_weight", "down_weight"):
            pairs.append((getattr(found, kind), getattr(original, kind)))
    for matrix, weight in pairs:
        assert torch.allclose(
            matrix.dequantised(torch.float32), expected(tensor_of(weight).float()), atol=1e-6
        )


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_plan_says_how_large_int8_weights_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made(name)
    monkeypatch.setattr("foredraft.load._kernel_problem", lambda: None)
    plan = plan_of(directory, weights="int8")
    assert (plan.weights, plan.dtype) == ("int8", "bfloat16")
    assert plan.number_format == "bfloat16, int8 weights"
    weights = load_weights(directory, read_config(directory), torch.bfloat16, bits=8)
    assert plan.read_bytes == int(plan.num_parameters * INT8.bytes_per_weight)
    assert plan.weight_bytes <= weights.num_bytes <= 1.05 * plan.weight_bytes  # groups filled up
    plain = plan_of(directory, weights="bf16")
    assert (plain.weights, plain.dtype) == ("bfloat16", "bfloat16")
    loaded = load_weights(
        directory, read_config(directory), torch.bfloat16, bits=plain.packed_bits
    ).num_bytes
    assert plain.weight_bytes <= loaded <= 1.05 * plain.weight_bytes
    assert plain.read_bytes <= plain.weight_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int8", "backend": "hf"}, "runs through transformers"),
        ({"weights": "int8", "device": "cpu"}, "no compiler"),
        ({"weights": "bf16", "dtype": "float32"}, "exclude each other"),
        ({"weights": "int5"}, "did you mean 'int8'"),
    ],
)
def test_int8_is_refused_where_it_does_not_run(
    options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made("llama")
    monkeypatch.setattr("foredraft.load._kernel_problem", lambda: "no compiler")
    with pytest.raises(ConfigError, match=message):
        plan_of(directory, **options)


def test_int8_is_there_on_gpus_that_have_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made("llama")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    has_kernels = "foredraft.models.native.cuda.has_kernels"
    monkeypatch.setattr(has_kernels, lambda device: False)
    with pytest.raises(ConfigError, match="on CPU with the fused kernel"):
        plan_of(directory, weights="int8", device="cuda")
    monkeypatch.setattr(has_kernels, lambda device: True)
    plan = plan_of(directory, weights="int8", device="cuda")
    assert (plan.decoder, plan.weights, plan.packed_bits) == ("graphed", "int8", 8)
    for options in ({"exact": True}, {"activations": "int8"}, {"cache_dtype": "int8"}):
        with pytest.raises(ConfigError, match="leave"):
            plan_of(directory, weights="int8", device="cuda", **options)


# -------------------------------------------------------------- bfloat16 weights laid out for tiles


@pytest.mark.parametrize(("shape", "num_parts"), [((32, 64), 1), ((50, 45), 1), ((70, 130), 2)])
def test_weights_come_back_as_they_were(shape: tuple[int, int], num_parts: int) -> None:
    weight_RK = noise(*shape).bfloat16()
    matrix = TILES.of_weight(weight_RK, num_parts)
    assert matrix.shape == shape
    assert torch.equal(matrix.dequantised(torch.bfloat16), weight_RK)


def test_rows_come_back_alone() -> None:
    weight_RK, indices_R = noise(1030, 45).bfloat16(), torch.tensor([5, 0, 17, 1029, 5])
    matrix = TILES.of_weight(weight_RK)
    assert torch.equal(matrix.rows(indices_R, torch.float32), weight_RK[indices_R].float())


def test_a_tile_holds_pairs_of_inputs_of_sixteen_rows() -> None:
    weight_RK = noise(16, 64).bfloat16()
    [[first, second]] = (
        TILES.of_weight(weight_RK).packed_GCN.view(torch.bfloat16).view(1, 2, 16, 16, 2)
    )
    assert torch.equal(first[3, 7], weight_RK[7, 6:8])
    assert torch.equal(second[0, 15], weight_RK[15, 32:34])


def test_a_shelf_puts_one_tensor_beside_the_other() -> None:
    shelf = Shelf()
    first, second = shelf.empty((3, 5)), shelf.empty((64,))
    assert (first.shape, second.shape) == ((3, 5), (64,))
    assert first.data_ptr() % (2 << 20) == 0
    assert second.data_ptr() == first.data_ptr() + 64
    large = shelf.empty((70 << 20,))  # more than a piece
    large[::4096] = 1
    assert len(large) == 70 << 20


# ------------------------------------------------------------------ the head's sums stay in float32


@pytest.mark.parametrize("num_rows", [1, 512, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_as_near_as_float32_comes(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    head_VE = torch.randn((num_rows, 96), generator=generator).to(dtype)
    normed_NE = torch.randn((5, 96), generator=generator).to(dtype)
    for head in (head_VE, INT8.of_weight(head_VE.float())):
        logits_NV, numbers_VE = head_logits(normed_NE, head), as_tensor(head, torch.float32)
        assert logits_NV.dtype == torch.float32
        assert (logits_NV - normed_NE.double() @ numbers_VE.double().T).abs().max() < 1e-4
    assert head_logits(normed_NE[:0], head_VE).shape == (0, num_rows)


@pytest.mark.parametrize("new_decoder", [EagerDecoder, FixedShapeDecoder])
def test_no_decoder_rounds_its_logits(new_decoder: DecoderFactory) -> None:
    """Rounded to bfloat16, hundreds of logits share a few dozen values."""
    target = NativeTarget.load(made("llama"), torch.bfloat16, new_decoder=new_decoder)
    for tokens in ([3], [5] * 20):
        [scores] = target.score([ScoreRow(target.cache.allocate(), tokens)])
        assert scores.logits_NV.dtype == torch.float32
        assert not torch.equal(scores.logits_NV, scores.logits_NV.bfloat16().float())
        assert len(scores.logits_NV.unique()) > 0.9 * target.vocab_size
