"""A description filled in anew has the bits of a new one, and joins what torch gives."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foredraft.cache.store import Entries
from foredraft.core.choices import LIKELIEST
from foredraft.core.tree import TokenTree
from foredraft.models.base import HeadRow, HeadWeights, ScoreRow
from foredraft.models.native import cpu
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.draft_layers import NativeHeadRunner, native_join
from foredraft.models.native.target import NativeTarget
from tests.drafters.heads import OUTPUT_IDS, decoded_by
from tests.drafters.test_heads import KINDS

TREE = TokenTree((1, 2, 3, 4, 5, 6), (-1, -1, 0, 2, 1, 3))


@pytest.fixture
def target() -> NativeTarget:
    return decoded_by("fused")


def new_runner(target: NativeTarget) -> NativeHeadRunner:
    module = KINDS["hidden_head"].start(target, OUTPUT_IDS).eval()
    output_RE = module.output.weight.detach()
    norm_E = torch.rand(len(module.norm.weight)) + 0.5
    return target.head_runner(
        HeadWeights([module.layer.weights()], norm_E, output_RE, module.shape)
    )


RUNS = [
    HeadRow(0, 0, 5),
    HeadRow(0, 0, 5, num_wanted=5),
    HeadRow(0, 3, 2, TREE, num_wanted=8),
    HeadRow(0, 4, 1, TREE, num_known=3, num_wanted=4),
    HeadRow(0, 4, 1, TREE, num_known=5, num_wanted=1),
]


def held(runner: NativeHeadRunner, slot: int) -> list[Tensor]:
    """Keys and values of all entries of the slot, those that do not count too."""
    return held_by(runner.layers, slot)


def held_by(entries: Entries, slot: int) -> list[Tensor]:
    store, table = entries.store, entries.table(slot)
    end = len(table) * store.block_size
    return [x for layer in range(store.shape.num_layers) for x in store.get(layer, table, end)]


def fresh(runner: NativeHeadRunner, fused: bool = True) -> NativeHeadRunner:
    """The same layers and entries behind a decoder that has run nothing."""
    return NativeHeadRunner(*runner._parts, runner.layers, fused)


@pytest.mark.parametrize("row", RUNS)
def test_a_run_of_a_head_has_the_bits_of_a_first_one(target: NativeTarget, row: HeadRow) -> None:
    runner, slot = new_runner(target), target.cache.allocate()
    assert slot == row.slot
    torch.manual_seed(2)
    # Known entries, and reserved memory.
    runner.run([HeadRow(slot, 0, 5, TREE)], torch.randn(11, 64))
    runner.run([HeadRow(slot, 0, 40)], torch.randn(40, 64))
    inputs_TE = torch.randn(row.num_text + len(row.tree) - row.num_known, 64)
    found = runner.run([row], inputs_TE)
    written = held(runner, slot)
    assert all(map(torch.equal, found, fresh(runner).run([row], inputs_TE)))
    assert all(map(torch.equal, written, held(runner, slot)))


BEHIND = [
    HeadRow(0, 128, 9),
    HeadRow(0, 133, 4, num_wanted=4),
    HeadRow(0, 136, 1, TREE, num_known=1, num_wanted=6),
    HeadRow(0, 136, 1, TREE, num_known=4, num_wanted=3),
]


@pytest.mark.parametrize("decoder", ["fused", "eager"])
@pytest.mark.parametrize("first", [128, 129, pytest.param(191, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", BEHIND)
def test_a_head_that_begins_in_the_middle_sees_nothing_before(
    decoder: str, first: int, row: HeadRow
) -> None:
    """It says what it says of the same text without its beginning, whatever lies there.

    Also where it begins in the middle of a block.
    """
    target = decoded_by(decoder)
    runner, slot = new_runner(target), target.cache.allocate()
    torch.manual_seed(2)
    runner.layers.reserve(slot, 0, 300)
    # Torch masks what it must not see in a block, by a product with zero; the kernel skips it.
    other = torch.nan if decoder == "fused" or first == 128 else 50.0
    runner.layers.store.keys.fill_(other)
    runner.layers.store.values.fill_(other)
    text_TE, tree_TE = torch.randn(9, 64), torch.randn(6, 64)
    inputs_TE = torch.cat([text_TE[row.start - 128 :][: row.num_text], tree_TE])
    inputs_TE = inputs_TE[row.num_known : row.num_text + len(row.tree)]
    short = target.cache.allocate()
    found = []
    for number, start in ((slot, first), (short, 0)):
        runner.run([HeadRow(number, start, 9)], text_TE)
        before = replace(row, slot=number, start=row.start - 128 + start)
        if row.num_known:
            runner.run(
                [replace(before, num_known=0, num_wanted=0)], torch.cat([text_TE[8:], tree_TE])
            )
        found.append(runner.run([before], inputs_TE))
        first_run = fresh(runner, decoder == "fused").run([before], inputs_TE)
        assert all(map(torch.equal, found[-1], first_run))
    assert runner.layers.first(slot) == first
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_work_memory_follows_a_long_text(target: NativeTarget) -> None:
    runner, slot = new_runner(target), target.cache.allocate()
    runner.run([HeadRow(slot, 0, 2100)], torch.randn(2100, 64))
    row, inputs_TE = HeadRow(slot, 2100, 3, num_wanted=2), torch.randn(3, 64)
    found = runner.run([row], inputs_TE)
    assert all(map(torch.equal, found, fresh(runner).run([row], inputs_TE)))


def test_forwards_of_all_kinds_in_turn_leave_nothing_to_each_other(target: NativeTarget) -> None:
    """Larger and smaller ones, with and without trees, taps, draws and layers; in moved blocks."""
    cache = target.cache
    chain, key = TokenTree.chain(range(9)), LIKELIEST.ahead(7)
    slots = [cache.allocate() for _ in range(3)]
    calls: list[tuple[list[ScoreRow], tuple[int, ...]]] = [
        ([ScoreRow(slots[0], range(40), wants_logits=False)], ()),
        ([ScoreRow(slots[0], [3], TREE, draw=key)], (0, 2)),
        ([ScoreRow(slots[0], [3], draw=key)], ()),
        (
            [
                ScoreRow(slot, [4, 5], tree)
                for slot, tree in zip(slots, (TREE, chain, TREE), strict=True)
            ],
            (1,),
        ),
        ([ScoreRow(slots[1], [4])], ()),
    ]
    for _ in range(2):
        for rows, taps in calls:
            scores = target.score(rows, taps)
            head_NV = target.parts.logits(torch.ones(len(rows), 64))
            used, target.decoder = target.decoder, FusedDecoder(target.config, target.weights)
            first = target.score(rows, taps)
            assert torch.equal(scores.logits_NV, first.logits_NV)
            assert torch.equal(head_NV, target.parts.logits(torch.ones(len(rows), 64)))
            assert [law and law.drawn for law in scores.drawn or ()] == [
                law and law.drawn for law in first.drawn or ()
            ]
            assert all(torch.equal(scores.taps[layer], first.taps[layer]) for layer in taps)
            target.decoder = used
        for slot in slots:
            cache.free(slot)  # of all: the memory is given back, too
        assert slots == [cache.allocate() for _ in range(3)]


@pytest.mark.parametrize("name", ["addressof", "zip", "weakref"])
def test_after_an_interrupt_all_is_said_anew(
    name: str, target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that grew has no address yet, or blocks that moved have none, or are not known."""
    slot = target.cache.allocate()
    target.score([ScoreRow(slot, [1, 2])])
    other = decoded_by("fused")
    other.cache.allocate()
    other.decoder, rows = target.decoder, [ScoreRow(slot, range(60))]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        broken = SimpleNamespace(ref=interrupted) if name == "weakref" else interrupted
        patched.setattr(cpu, name, broken, raising=False)
        with pytest.raises(KeyboardInterrupt):
            other.score(rows)
    before = held_by(target.cache, slot)
    found = other.score(rows)
    other.decoder = FusedDecoder(target.config, target.weights)
    assert torch.equal(found.logits_NV, other.score(rows).logits_NV)
    assert all(map(torch.equal, before, held_by(target.cache, slot)))


@pytest.mark.parametrize("num_states", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 21])
def test_joins_agree(num_states: int, dtype: torch.dtype, count: int) -> None:
    decoded_by("fused")  # skips where there is no kernel
    torch.manual_seed(count)
    weight_EK, table_VE = torch.randn(48, num_states * 64), torch.randn(20, 48)
    states = [torch.randn(count, 2, 64).to(dtype)[:, 0] * 9 for _ in range(num_states)]
    tokens = [token % 20 for token in range(count)]
    for table in (None, table_VE):
        fused, plain = (
            native_join(weight_EK, table, 1e-5, torch.float32, fused)(states, tokens)
            for fused in (True, False)
        )
        assert fused.shape == plain.shape == (count, 48)
        assert (fused - plain).norm() < 0.02 * plain.norm()
