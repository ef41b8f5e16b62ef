"""Products with weights in few bits, and mixtures, on a GPU: they equal what they stand for.

On a CPU they run in Triton's interpreter, where it is installed: `TRITON_INTERPRET=1 pytest ...`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import PagedDecoder
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.quant import (
    INT4,
    NESTED4,
    QUANTISED,
    Blocks,
    Form,
    PackedMatrix,
    Stack,
    as_tensor,
)
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import DecoderWeights
from tests.models.checkpoints import made, text
from tests.models.on_triton import DEVICE, INTERPRETED, NEEDS_GPU, TREE, Pair

pytestmark = NEEDS_GPU
CARD = torch.device(DEVICE)
DTYPES = [torch.float32 if INTERPRETED else torch.bfloat16]
"""The interpreter multiplies no bfloat16."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
"""Of the norm of the difference, with the rounding of results to the dtype."""

FORMS = [form for form in QUANTISED if not form.has_fine_minima]
"""Those that lie on a card; others are dequantised."""

if torch.cuda.is_available() or INTERPRETED:
    from foredraft.models.native import triton_packed as packed
    from foredraft.models.native.triton_ops import Norm


def made_up(form: Form, num_rows: int, num_inputs: int) -> PackedMatrix:
    """Any numbers that the form can hold."""
    generator = torch.Generator().manual_seed(num_rows)
    fields = {name: dtype for name, _, dtype in (*form.head, *form.steps)}
    block = 64 // form.head[0][1]
    half = 1 << form.bits - 1
    low, high = (-half, half) if form.is_signed else (0, 2 * half)
    count = num_inputs // block

    def numbers(dtype: torch.dtype, columns: int, sign: float = 1.0) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(1, 64, (num_rows, columns), generator=generator).to(torch.int8)
        found = 0.002 + 0.004 * torch.rand(num_rows, columns, generator=generator)
        return (sign * found).half()

    integers = torch.randint(low, high, (num_rows, count, block), generator=generator)
    if form.codes:
        integers = torch.tensor(form.codes)[integers]
    blocks = Blocks(
        integers.to(torch.int8),
        scales_RB=numbers(fields["scales_RB"], count),
        minima_RB=numbers(fields["minima_RB"], count, -8.0) if "minima_RB" in fields else None,
        steps_RS=(
            numbers(torch.float16, num_inputs // 256).to(fields["steps_RS"]) if form.steps else None
        ),
        minimum_steps_RS=(
            numbers(torch.float16, num_inputs // 256, -8.0) if len(form.steps) > 1 else None
        ),
    )
    return form.of_blocks(blocks, num_inputs)


def on_card(matrix: PackedMatrix) -> packed.CardMatrix:
    return packed.CardMatrix.of(matrix, CARD)


def inputs(num_tokens: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, num_inputs, generator=generator).to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, float(error)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_weights_are_those_of_the_form(form: Form) -> None:
    matrix = made_up(form, 72, 256 if form.steps else 96)
    card = on_card(matrix)
    expected = matrix.dequantised(torch.float32).to(DEVICE)
    assert_near(card.dequantised(torch.float32), expected, 5e-4)  # products of scales: float16
    rows = torch.tensor([3, 71, 3, 40])
    assert torch.equal(card.rows(rows, torch.float32), card.dequantised(torch.float32)[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_products_equal_those_of_dequantised_weights(form: Form, dtype: torch.dtype) -> None:
    card = on_card(made_up(form, 144, 768 if form.steps else 704))
    num_inputs = card.num_inputs
    x_NK, norm_K = inputs(5, num_inputs, dtype), inputs(1, num_inputs, dtype)[0]
    bias_M, residual = inputs(1, 144, dtype)[0], inputs(5, 144, dtype)
    weight = card.dequantised(torch.float32)
    normed = F.rms_norm(x_NK.float(), (num_inputs,), 1.0 + norm_K.float(), 1e-5).to(dtype)
    found = packed.multiply(
        *(x_NK, card, bias_M), norm=Norm(norm_K, 1e-5, 1.0), dtype=torch.float32
    )
    expected = F.linear(normed.float(), weight, bias_M.float())
    assert_near(found, expected, 1e-5 if dtype == torch.float32 else 2e-3)
    found = packed.multiply(x_NK, card, residual_NM=residual, scale=0.3)
    expected = residual.float() + 0.3 * F.linear(x_NK.float(), weight)
    assert_near(found, expected, TOLERANCE[dtype])
    for name, function in (
        ("silu", F.silu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ):
        found = packed.multiply(x_NK, card, activation=name)
        gates, ups = F.linear(x_NK.float(), weight).chunk(2, 1)
        assert_near(found, function(gates) * ups, TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_split_products_add_up_in_order(splits: int) -> None:
    card = on_card(made_up(NESTED4, 100, 1024))
    x_NK = inputs(20, 1024, torch.float32)
    _, sums = packed.prepared(x_NK, None, 2 * card.num_chunks)
    tiles = {"TILE_M": 32, "SPLITS": splits, "STAGES": 2, "num_warps": 2}
    for _ in range(2):  # the counters are zeros again
        found = packed.product(x_NK, card, sums=sums, tiles=tiles)
        assert_near(found, F.linear(x_NK, card.dequantised(torch.float32)), 1e-5)
    assert not card.counters.any()


@pytest.mark.parametrize("splits", [1, 2])
def test_products_give_the_sums_of_their_own_groups(splits: int) -> None:
    card = on_card(made_up(NESTED4, 1024, 512))
    x_NK = inputs(20, 512, torch.float32)
    _, sums = packed.prepared(x_NK, None, 16)
    tiles = {"TILE_M": 32, "SPLITS": splits, "STAGES": 2, "num_warps": 2}
    out_sums = packed.room_for_sums(20, 512, card, x_NK)
    options = {"activation": "silu", "out_sums": out_sums, "tiles": tiles}
    found = packed.product(x_NK, card, sums=sums, **options)
    assert out_sums is not None
    numbers = out_sums.view(20, -1, 2, 8).sum(2).flatten(1)
    assert_near(numbers, found.view(20, 16, 32).sum(2), 1e-5)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's products depend on a token's place")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_company_changes_no_bit(form: Form) -> None:
    card = on_card(made_up(form, 1024, 2048))
    x_NK = inputs(16, 2048, torch.bfloat16)
    norm = Norm(x_NK[0], 1e-5)

    def products(some_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Gated, and the sums of their groups."""
        sums = packed.room_for_sums(len(some_NK), 512, on_card(made_up(NESTED4, 32, 512)), some_NK)
        options = {"norm": norm, "activation": "silu", "out_sums": sums}
        assert sums is not None
        return packed.multiply(some_NK, card, **options), sums

    together = products(x_NK)
    for size in range(1, 17):
        for first in range(0, 17 - size, size):
            rows = slice(first, first + size)
            for mine, theirs in zip(products(x_NK[rows]), together, strict=True):
                assert torch.equal(mine, theirs[rows])


def test_prompts_are_multiplied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    card, x_NK = (
        on_card(INT4.of_weight(torch.randn(200, 128))),
        inputs(40, 128, torch.float32),
    )
    expected = F.linear(x_NK, card.dequantised(torch.float32))
    monkeypatch.setattr(packed, "_PIECE", 64 * 128)
    assert_near(packed.dequantised_product(x_NK, card, None), expected, 1e-6)


def dequantised(weights: DecoderWeights) -> DecoderWeights:
    """Plain numbers on the device."""

    def moved(_: str, matrix: Stack, num_parts: int = 1) -> Tensor:
        return as_tensor(matrix, weights.dtype).to(DEVICE)

    return replace(
        weights,
        embedding_VE=moved("", weights.embedding_VE),
        layers=tuple(layer.with_matrices(moved) for layer in weights.layers),
        head_VE=moved("", weights.head_VE),
    )


def test_weights_on_a_card_stay_as_they_are() -> None:
    weights = NativeTarget.load(made("llama-tied"), device=DEVICE, bits=4).weights
    there = packed.on_card(weights, CARD)
    again = packed.on_card(there, CARD)
    assert again.layers[0].qkv_weight is there.layers[0].qkv_weight
    assert again.head_VE is there.head_VE


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "qwen3-moe"])
def test_steps_equal_the_eager_decoder(family: str, bits: int) -> None:
    directory = made(family)
    eager = NativeTarget.load(directory, device=DEVICE, bits=bits)
    paged = NativeTarget.load(directory, device=DEVICE, bits=bits, new_decoder=PagedDecoder)
    eager.decoder = EagerDecoder(eager.config, dequantised(eager.weights))
    pair = Pair(eager, paged)
    slot, other = pair.open(text(20)), pair.open(text(30))
    rows = [ScoreRow(slot, [11, 12], TREE), ScoreRow(other, [3], TokenTree.chain((4, 5)))]
    pair.score(rows, taps=(1,))
    assert pair.num_replayed == 1
