"""Products of weights in few bits: every instruction set of this machine gives the same bits.

Integer sums are exact, so all instruction sets agree with the portable code. What
rounds, the bfloat16 products of tiles, is compared with an emulation of the instruction's rounding.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from ctypes import c_int64, c_void_p

import pytest
import torch
from torch import Tensor

from foredraft.kernels.instructions import INSTRUCTION_SETS, InstructionSet, cpu_features
from foredraft.models.native.quant import (
    CHUNK_INPUTS,
    NESTED6,
    PACKED,
    QUANTISED,
    STEP_INPUTS,
    TILES,
    Blocks,
    Form,
    PackedMatrix,
)
from tests.kernels.compiled import compiled

FORM_PACKED, FORM_TILED = 1, 2
ONE_ROUNDING = "-DFOREDRAFT_EMULATE_FMA"
PORTABLE = InstructionSet("reference", "plain C++", flags=(ONE_ROUNDING,))
PLAIN = (ONE_ROUNDING, "-O1")
"""Of emulations: optimised as kernels are, they would take minutes to compile."""
EMULATIONS = (
    InstructionSet("digits", "two digits of 8 bits", flags=(*PLAIN, "-DFOREDRAFT_DIGITS")),
    InstructionSet("tiles", "tiles in plain C++", flags=(*PLAIN, "-DFOREDRAFT_EMULATE_TILES")),
)
HERE = [one for one in INSTRUCTION_SETS if one.runs_on(platform.machine(), cpu_features())]
EXACT = [one for one in HERE if one.flags or "aarch64" in platform.machine()]
"""Without multiply-adds, as of the oldest CPUs, blocks are added up with one more rounding."""
AMX = [one for one in HERE if one.name == "amx"]
NESTED = [kind for kind in QUANTISED if kind.steps]
EIGHT = [kind for kind in QUANTISED if kind.takes_eight]
SIZES = [(64, 128), (48, 576), (50, 45), (16, 1536), (130, 96)]
"""Of rows and inputs. 576 are two whole runs of four chunks, and a part of one."""
TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 40, 65)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def library(instructions: InstructionSet) -> ctypes.CDLL:
    loaded = compiled("products", instructions)
    loaded.foredraft_multiply.argtypes = [
        *([c_int64] * 2 + [c_void_p] + [c_int64] * 3),
        *(c_void_p, c_int64, c_int64, c_void_p),
    ]
    loaded.foredraft_multiply.restype = None
    loaded.foredraft_unpack_row.argtypes = [c_int64, c_void_p, c_int64, c_int64, c_void_p]
    loaded.foredraft_unpack_row.restype = None
    loaded.foredraft_has_tiles.restype = c_int64
    loaded.foredraft_emulated_tile_product.argtypes = [c_void_p] * 3
    loaded.foredraft_emulated_tile_product.restype = None
    return loaded


def multiply(
    instructions: InstructionSet,
    weights: PackedMatrix,
    rows: range,
    x_TK: Tensor,
    activation_bits: int = 16,
) -> Tensor:
    """Rows of a product [T, R]."""
    out_TR = torch.empty(len(x_TK), len(rows))
    form = FORM_TILED if weights.form is TILES else FORM_PACKED
    library(instructions).foredraft_multiply(
        form, weights.form.code, weights.packed_GCN.data_ptr(), rows.start, rows.stop,
        x_TK.shape[1], x_TK.data_ptr(), len(x_TK), activation_bits == 8, out_TR.data_ptr(),
    )  # fmt: skip
    return out_TR


def one_by_one(
    instructions: InstructionSet,
    weights: PackedMatrix,
    rows: range,
    x_TK: Tensor,
    activation_bits: int = 16,
) -> Tensor:
    alone = (x_K[None].contiguous() for x_K in x_TK)
    return torch.cat([multiply(instructions, weights, rows, x, activation_bits) for x in alone])


def made_up(kind: Form, num_rows: int, num_inputs: int) -> PackedMatrix:
    """A matrix of any integers and scales that the format can hold."""
    generator = torch.Generator().manual_seed(num_rows + num_inputs)
    counts = {field: count for field, count, _ in kind.head}
    num_chunks = -(-num_inputs // CHUNK_INPUTS)
    num_steps = -(-num_inputs // STEP_INPUTS)
    num_blocks = num_chunks * counts["scales_RB"]
    block_inputs = CHUNK_INPUTS // counts["scales_RB"]

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.int8)

    def head(field: str, count: int, dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            low, high = (0, 64) if kind.bits in (4, 5) and "minima_RB" in counts else (-128, 128)
            return integers(low, high, num_rows, num_chunks * count)
        columns = num_steps if kind.steps else num_chunks * count
        numbers = torch.randn(num_rows, columns, generator=generator)
        return (numbers / (100 if kind.steps else 1)).half().to(dtype)

    span = 1 << kind.bits
    low, high = (-span // 2, span // 2) if kind.is_signed else (0, span)
    weights = integers(low, high, num_rows, num_blocks, block_inputs)
    if kind.codes:
        weights = torch.tensor(kind.codes, dtype=torch.int8)[weights.long()]
    weights.view(num_rows, -1)[:, num_inputs:] = 0
    fields = (*kind.steps, *kind.head)
    blocks = Blocks(weights, **{field: head(field, *rest) for field, *rest in fields})
    return kind.of_blocks(blocks, num_inputs)


@pytest.mark.parametrize("instructions", [*EXACT, *EMULATIONS], ids=lambda one: one.summary)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_packed_products_have_the_bits_of_the_portable_code(
    instructions: InstructionSet, size: tuple[int, int], kind: Form
) -> None:
    num_rows, num_inputs = size
    weights, rows = made_up(kind, *size), range(num_rows)
    x_TK = 10 * noise(max(TOKENS), num_inputs, seed=1)
    for bits in (16, 8) if kind in EIGHT else (16,):
        expected = one_by_one(PORTABLE, weights, rows, x_TK, bits)
        for count in TOKENS:
            found = multiply(instructions, weights, rows, x_TK[:count].contiguous(), bits)
            assert torch.equal(found, expected[:count])


@pytest.mark.parametrize("kind", EIGHT, ids=lambda kind: kind.name)
def test_activations_of_8_bits_have_a_scale_for_each_32(kind: Form) -> None:
    matrix = made_up(kind, 50, 96)
    x_TK = noise(9, 96, seed=1) * 10.0 ** noise(9, 3, seed=2).repeat_interleave(32, 1)
    blocks_TBC = x_TK.view(9, 3, 32)
    step_TB1 = blocks_TBC.abs().amax(-1, keepdim=True) / 127
    rounded_TK = ((blocks_TBC / step_TB1).round() * step_TB1).view(9, 96)
    expected = rounded_TK.double() @ matrix.dequantised(torch.float64).T
    found = multiply(PORTABLE, matrix, range(50), x_TK, 8).double()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_rows_come_out_as_the_very_numbers(kind: Form) -> None:
    """As of embeddings, in every instruction set; and so do products with single inputs."""
    matrix = made_up(kind, 50, 96)
    expected = matrix.dequantised(torch.float32)
    for instructions in [PORTABLE, *HERE, *EMULATIONS]:
        found = torch.empty(50, 96)
        for row in range(50):
            library(instructions).foredraft_unpack_row(
                matrix.form.code, matrix.packed_GCN.data_ptr(), row, 96, found[row].data_ptr()
            )
        assert torch.equal(found, expected)
    products = multiply(PORTABLE, matrix, range(50), torch.eye(96)).T
    assert torch.allclose(products, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "kind", [kind for kind in NESTED if kind in EIGHT], ids=lambda kind: kind.name
)
def test_the_largest_nested_numbers_meet_activations_of_8_bits(kind: Form) -> None:
    """Integers, factors and activations at their ends: no sum of 16 bits overflows, none rounds."""
    counts = {field: count for field, count, _ in kind.head}
    span = 1 << kind.bits
    low, high = (-span // 2, span // 2 - 1) if kind.is_signed else (0, span - 1)
    least, most = (-128, 127) if kind is NESTED6 else (-127, 127)
    signs_RK = noise(32, 192, seed=3).sign()
    signs_RK[0], signs_RK[1] = 1, -1
    integers = torch.where(signs_RK > 0, high, low).to(torch.int8)
    heads = {
        field: torch.where(noise(32, 3 * count, seed=count) > 0, most, least).to(torch.int8)
        for field, count, _ in kind.head
    }
    heads |= {field: torch.ones(32, 1, dtype=dtype) for field, _, dtype in kind.steps}
    blocks = Blocks(integers.view(32, 3 * counts["scales_RB"], -1), **heads)
    weights = kind.of_blocks(blocks, 192)
    x_TK = signs_RK[:17] * torch.linspace(0.5, 7, 17)[:, None]
    step_T1 = x_TK.abs().amax(-1, keepdim=True) / 127
    exact = x_TK.double() @ weights.dequantised(torch.float64).T
    expected = one_by_one(PORTABLE, weights, range(32), x_TK, 8)
    assert torch.allclose(expected.double(), exact, rtol=1e-5, atol=float(step_T1.max()))
    for instructions in [*EXACT, *EMULATIONS]:
        for count in (1, 2, 3, 4, 5, 9, 17):
            found = multiply(instructions, weights, range(32), x_TK[:count].contiguous(), 8)
            assert torch.equal(found, expected[:count])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_numbers_meet_without_an_overflow(bits: int) -> None:
    """Least and greatest weights and activations, alone and mixed."""
    signs_RK = torch.ones(32, 96)
    signs_RK[1::4], signs_RK[2::4, ::2], signs_RK[3::4] = -1, -1, noise(8, 96).sign()
    weights = PACKED[bits].of_weight(3 * signs_RK)
    x_TK = signs_RK[:9].roll(1, dims=1) * torch.linspace(0.5, 7, 9)[:, None]
    step_T1 = x_TK.abs().amax(-1, keepdim=True) / 32639
    numbers_TK = (x_TK / step_T1).round().double()
    exact = (numbers_TK * step_T1) @ PACKED[bits].of_weight(3 * signs_RK).dequantised(
        torch.float64
    ).T
    expected = one_by_one(PORTABLE, weights, range(32), x_TK)
    assert torch.allclose(expected.double(), exact, rtol=1e-5, atol=1e-3)
    for instructions in [*EXACT, *EMULATIONS]:
        for count in range(1, 10):
            found = multiply(instructions, weights, range(32), x_TK[:count].contiguous())
            assert torch.equal(found, expected[:count])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_broken_activation_breaks_its_token_and_no_other(bits: int, broken: float) -> None:
    weights = PACKED[bits].of_weight(noise(16, 45))
    x_TK = noise(45, 45, seed=1)
    whole = multiply(PORTABLE, weights, range(16), x_TK)
    for instructions in [*EXACT, *EMULATIONS]:
        found = multiply(instructions, weights, range(16), x_TK.fill_diagonal_(broken))
        assert found.isnan().all()
        x_TK[1:] = noise(45, 45, seed=1)[1:]
        found = multiply(instructions, weights, range(16), x_TK)
        assert found[0].isnan().all()
        assert torch.equal(found[1:], whole[1:])


# -------------------------------------------------------------------------------------------- tiles


def _need_tiles(instructions: InstructionSet) -> None:
    if not library(instructions).foredraft_has_tiles():
        pytest.skip("the system does not let processes use tiles")


@pytest.mark.parametrize("instructions", AMX, ids=lambda one: one.name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_round_as_their_emulation(
    instructions: InstructionSet, size: tuple[int, int]
) -> None:
    _need_tiles(instructions)
    num_rows, num_inputs = size
    weights = TILES.of_weight(noise(num_rows, num_inputs))
    x_TK = noise(max(TOKENS), num_inputs, seed=1) * 10.0 ** noise(max(TOKENS), 1, seed=2)
    emulated = multiply(EMULATIONS[1], weights, range(num_rows), x_TK)
    assert torch.equal(multiply(instructions, weights, range(num_rows), x_TK), emulated)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e18])
def test_one_tile_product_rounds_as_its_emulation(scale: float) -> None:
    """Subnormal factors, products and sums among them, which count as zeros."""
    [instructions] = AMX or pytest.skip("this CPU has no tiles")
    _need_tiles(instructions)
    rows, activations = (noise(16, 32) * scale).bfloat16(), noise(16, 32, seed=1).bfloat16()
    columns = rows.view(16, 16, 2).transpose(0, 1).contiguous()
    sums_TR = torch.zeros(16, 16)
    library(instructions).foredraft_emulated_tile_product(
        activations.data_ptr(), columns.data_ptr(), sums_TR.data_ptr()
    )
    found = multiply(instructions, TILES.of_weight(rows), range(16), activations.float())
    assert torch.equal(found, sums_TR)


@pytest.mark.parametrize("instructions", [*AMX, EMULATIONS[1]], ids=lambda one: one.name)
def test_a_token_on_tiles_has_the_same_bits_in_any_company(instructions: InstructionSet) -> None:
    _need_tiles(instructions)
    for num_rows, num_inputs in SIZES[:3]:
        weights, rows = TILES.of_weight(noise(num_rows, num_inputs)), range(num_rows)
        x_TK = noise(max(TOKENS), num_inputs, seed=1)
        expected = one_by_one(instructions, weights, rows, x_TK)
        for count in TOKENS:
            found = multiply(instructions, weights, rows, x_TK[:count])
            assert torch.equal(found, expected[:count])
        part = multiply(instructions, weights, range(16, num_rows - 3), x_TK)
        assert torch.equal(part, expected[:, 16:-3])


def test_two_parts_hold_sixteen_bits_of_an_activation() -> None:
    weight_RK = noise(64, 256).bfloat16()
    x_TK = noise(8, 256, seed=1)
    found = multiply(EMULATIONS[1], TILES.of_weight(weight_RK), range(64), x_TK).double()
    expected = x_TK.double() @ weight_RK.double().T
    assert (found - expected).abs().max() < 2.0**-15 * expected.abs().max()
