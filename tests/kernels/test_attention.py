"""Attention on tiles and in float32: what it is, and the same bits in any company.

Shape legend: T tokens, G query heads of a key-value head, D head size, N entries.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.kernels.instructions import InstructionSet, available
from tests.kernels.compiled import compiled

LOG2_E = math.log2(math.e)
BLOCK = 64
CHUNK = 256
EMULATED = ("-DFOREDRAFT_EMULATE_FMA", "-DFOREDRAFT_EMULATE_TILES")
PLAIN = InstructionSet("tiles in plain C++", "", flags=EMULATED)
HERE = {one.name: one for one in available()}
AMX = HERE.get("amx")
BESIDE = (
    InstructionSet("emulated beside vectors", "", flags=(*HERE["avx512"].flags, EMULATED[1]))
    if "avx512" in HERE
    else PLAIN
)
"""Tiles in plain C++, all else as on CPUs that have tiles."""
ON_TILES = [PLAIN, BESIDE, *([AMX] if AMX else [])]
SHAPES = [(3, 64), (1, 10), (5, 80), (17, 32)]
"""Query heads of a key-value head, head size."""


@dataclass(frozen=True)
class Token:
    """The entries that a token sees: those before ``prefix``, and ``extras`` after it."""

    prefix: int
    extras: tuple[int, ...] = ()

    @property
    def seen(self) -> list[int]:
        return [*range(self.prefix), *self.extras]


def chain(first: int, count: int) -> list[Token]:
    return [Token(first, tuple(range(first, first + i + 1))) for i in range(count)]


def branches(first: int, count: int) -> list[Token]:
    """A tree of three branches behind some tokens of a chain."""
    ancestors: list[tuple[int, ...]] = [(first,)]
    for i in range(1, count - 2):
        ancestors.append((*ancestors[max(0, i - 3)], first + i))
    return [Token(first - 1), Token(first), *(Token(first, seen) for seen in ancestors)]


TOKENS = {
    "chain": chain(500, 9),
    "prompt": [Token(i + 1) for i in range(16)],
    "over a chunk": chain(CHUNK - 3, 7),
    "tree": branches(530, 14),
    "tree over a chunk": branches(CHUNK - 2, 16),
    "tree at the beginning": branches(2, 8),
    "far apart": [Token(40), Token(300), Token(301, (310, 320)), Token(700), Token(31)],
}


class Layer(ctypes.Structure):
    """``ForedraftAttention`` of attention.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "group", "head_dim", "block_entries")),
        *((name, c_int64) for name in ("window", "int8_entries")),
        ("cap", c_double),
        *((name, c_void_p) for name in ("table", "prefixes", "extra_starts", "extras")),
        *((name, c_void_p) for name in ("keys", "values", "queries", "out")),
    )


@functools.cache
def library(instructions: InstructionSet) -> ctypes.CDLL:
    loaded = compiled("attention", instructions)
    loaded.foredraft_attend.argtypes = [c_void_p, c_int64]
    loaded.foredraft_attend.restype = None
    loaded.foredraft_has_tiles.restype = c_int64
    loaded.foredraft_put_int8_entry.argtypes = [c_void_p, c_int64, c_void_p]
    loaded.foredraft_put_int8_entry.restype = None
    return loaded


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int8_entries(x: Tensor, instructions: InstructionSet) -> Tensor:
    """Entries [..., 4 + D] of numbers [..., D]."""
    entries = torch.empty(*x.shape[:-1], 4 + x.shape[-1], dtype=torch.int8)
    for numbers, entry in zip(x.flatten(0, -2), entries.flatten(0, -2), strict=True):
        library(instructions).foredraft_put_int8_entry(
            numbers.data_ptr(), len(numbers), entry[4:].data_ptr()
        )
    return entries


def read_int8(entries: Tensor) -> Tensor:
    """The numbers [N, D] in float64 that entries [N, 4 + D] stand for."""
    return entries[:, 4:].double() * entries[:, :4].clone().view(torch.float32).double()


class Slot:
    """Keys and values of 768 entries, in blocks that lie in disorder.

    Args:
        in_int8: the instructions that write the entries as int8; None: they are bfloat16.
    """

    def __init__(self, head_dim: int, in_int8: InstructionSet | None = None) -> None:
        num_blocks = 12
        self.head_dim, self.in_int8 = head_dim, in_int8 is not None
        self.table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).int()
        shape = (num_blocks, BLOCK, head_dim)
        self.keys, self.values = (noise(*shape, seed=i).bfloat16() for i in (1, 2))
        if in_int8:
            self.keys, self.values = (
                int8_entries(x.float(), in_int8) for x in (self.keys, self.values)
            )

    def of_entries(self, store: Tensor) -> Tensor:
        """[N, D] as float64, in the order of entries."""
        entries = store[self.table.long()].flatten(0, 1)
        return read_int8(entries) if self.in_int8 else entries.double()

    def attend(
        self,
        instructions: InstructionSet,
        tokens: Sequence[Token],
        q_TGD: Tensor,
        tiles: bool,
        window: int = 0,
        cap: float = 0.0,
    ) -> Tensor:
        """Attention outputs [T, G, D] over the last ``window`` visible entries; 0: over all."""
        if tiles and not library(instructions).foredraft_has_tiles():
            pytest.skip("the system does not let processes use tiles")
        q_TGD, out_TGD = q_TGD.contiguous(), torch.empty_like(q_TGD)
        extras = [entry for token in tokens for entry in token.extras]
        starts = [sum(len(token.extras) for token in tokens[:i]) for i in range(len(tokens) + 1)]
        numbers = [
            torch.tensor(listed or [0], dtype=torch.int32)
            for listed in ([token.prefix for token in tokens], starts, extras)
        ]
        tensors = [self.table, *numbers, self.keys, self.values, q_TGD, out_TGD]
        sizes = (len(tokens), q_TGD.shape[1], self.head_dim, BLOCK, window, int(self.in_int8))
        layer = Layer(*sizes, cap * LOG2_E, *(tensor.data_ptr() for tensor in tensors))
        library(instructions).foredraft_attend(ctypes.byref(layer), int(tiles))
        return out_TGD

    def reference(
        self, tokens: Sequence[Token], q_TGD: Tensor, window: int = 0, cap: float = 0.0
    ) -> Tensor:
        """The same in float64."""
        keys, values = (self.of_entries(s) for s in (self.keys, self.values))
        rows = []
        for token, q_GD in zip(tokens, q_TGD.double(), strict=True):
            seen = token.seen[-window:]
            scores = q_GD @ keys[seen].T / LOG2_E  # queries are scaled for base 2
            scores = cap * torch.tanh(scores / cap) if cap else scores
            rows.append(scores.softmax(-1) @ values[seen])
        return torch.stack(rows)


def queries(num_tokens: int, group: int, head_dim: int) -> Tensor:
    return noise(num_tokens, group, head_dim, seed=7) * 3 / math.sqrt(head_dim)


WAYS = [*((one, True) for one in ON_TILES), (PLAIN, False), (next(iter(HERE.values())), False)]


def check(
    slot: Slot,
    tokens: Sequence[Token],
    q_TGD: Tensor,
    instructions: InstructionSet,
    *how: Any,
) -> None:
    """Each token attends to what it sees, and with the same bits in any company.

    Args:
        how: tiles, window and cap.
    """
    together = slot.attend(instructions, tokens, q_TGD, *how)
    expected = slot.reference(tokens, q_TGD, *how[1:])
    assert (together - expected).abs().max() < 2.0**-14 * expected.abs().max()
    singles = [(i, i + 1) for i in range(len(tokens))]
    for first, end in (*singles, (0, 2), (1, len(tokens)), (2, 5)):
        some = slot.attend(instructions, tokens[first:end], q_TGD[first:end], *how)
        assert torch.equal(some, together[first:end])


@pytest.mark.parametrize(("instructions", "tiles"), WAYS, ids=lambda one: getattr(one, "name", one))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", TOKENS)
def test_a_token_attends_to_what_it_sees_and_in_company_with_the_same_bits(
    name: str, shape: tuple[int, int], instructions: InstructionSet, tiles: bool
) -> None:
    tokens = TOKENS[name]
    check(Slot(shape[1]), tokens, queries(len(tokens), *shape), instructions, tiles)


IN_FLOATS = [PLAIN, next(iter(HERE.values())), *([HERE["avx2"]] if "avx2" in HERE else [])]
INT8_SHAPES = [*SHAPES, (2, 6), (1, 128)]


@pytest.mark.parametrize("shape", INT8_SHAPES, ids=str)
def test_an_int8_entry_is_within_half_a_step_and_says_so_in_the_same_bits(
    shape: tuple[int, int],
) -> None:
    x = noise(40, shape[1]) * torch.logspace(-4, 4, 40)[:, None]
    x[0], x[1] = 0.0, x[1] / 3e34  # nothing, and too little for a scale
    x[2, 1], x[3, 0], x[4, -1] = math.nan, math.inf, -math.inf
    found = [int8_entries(x, instructions) for instructions in IN_FLOATS]
    assert all(torch.equal(each, found[0]) for each in found)
    numbers = read_int8(found[0])
    assert numbers[2:5].isnan().all()
    assert not numbers[:2].any()
    size = x[5:].abs().amax(1, keepdim=True).double()
    assert ((numbers[5:] - x[5:].double()).abs() <= size / 254 * (1 + 1e-6)).all()
    assert (found[0][5:, 4:].abs().amax(1) == 127).all()


@pytest.mark.parametrize("instructions", IN_FLOATS, ids=lambda one: one.name)
@pytest.mark.parametrize("shape", INT8_SHAPES, ids=str)
@pytest.mark.parametrize("name", TOKENS)
def test_int8_entries_give_the_same_bits_alone_and_in_company(
    name: str, shape: tuple[int, int], instructions: InstructionSet
) -> None:
    slot, tokens = Slot(shape[1], in_int8=instructions), TOKENS[name]
    check(slot, tokens, queries(len(tokens), *shape), instructions, False)


@pytest.mark.parametrize("instructions", IN_FLOATS, ids=lambda one: one.name)
@pytest.mark.parametrize("window", [1, 6, 100, 256, 300])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("name", TOKENS)
def test_a_window_and_a_cap_are_the_same_alone_and_in_company(
    name: str, shape: tuple[int, int], window: int, instructions: InstructionSet
) -> None:
    slot, tokens = Slot(shape[1]), TOKENS[name]
    behind = min(token.prefix + len(token.extras) for token in tokens) - window
    for entry in range(max(0, behind)):  # not visible: they must not matter
        slot.values[slot.table[entry // BLOCK], entry % BLOCK] = math.nan
    for cap in (0.0, 2.0):
        check(slot, tokens, queries(len(tokens), *shape), instructions, False, window, cap)


@pytest.mark.skipif(AMX is None, reason="this CPU has no tiles")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", TOKENS)
def test_tiles_have_the_bits_of_their_emulation(name: str, shape: tuple[int, int]) -> None:
    assert AMX is not None
    slot, tokens = Slot(shape[1]), TOKENS[name]
    q_TGD = queries(len(tokens), *shape)
    found = slot.attend(AMX, tokens, q_TGD, tiles=True)
    assert torch.equal(found, slot.attend(BESIDE, tokens, q_TGD, tiles=True))


@pytest.mark.parametrize(("instructions", "tiles"), WAYS, ids=lambda one: getattr(one, "name", one))
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_a_token_does_not_see_may_be_anything(
    bad: float, instructions: InstructionSet, tiles: bool
) -> None:
    slot, tokens = Slot(64), chain(500, 9)
    q_TGD = queries(len(tokens), 3, 64)
    expected = slot.attend(instructions, tokens, q_TGD, tiles)
    for store in (slot.keys, slot.values):
        store[slot.table[505 // BLOCK], 505 % BLOCK] = bad
    found = slot.attend(instructions, tokens, q_TGD, tiles)
    assert torch.equal(found[:5], expected[:5])
    assert not found[5:].isfinite().all()
