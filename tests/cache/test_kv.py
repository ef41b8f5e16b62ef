"""All caches obey one contract: they hold what a plain list would hold.

`TokenCache` stores tokens, the others tensors. A probe writes token t as the value t everywhere in
the token's entry, so what a cache holds can be read back as tokens and compared with a list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.cache.kv import KVCache, KVShape
from foredraft.cache.paged import Cache
from foredraft.cache.store import BlockStore
from foredraft.core.errors import CacheFullError
from foredraft.core.tree import TokenTree
from foredraft.models.hf.cache import HFCache, SlotLayer
from foredraft.models.table import TokenCache

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4)


class Probe(Protocol):
    """A cache, and the means to write and read its entries as tokens."""

    @property
    def cache(self) -> Cache: ...

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """Like a forward: write entries behind the valid ones."""

    def read(self, slot: int) -> list[int]:
        """The entries that count."""


class TokenProbe:
    def __init__(self, max_tokens: int | None = None) -> None:
        self.cache = TokenCache(max_tokens=max_tokens)

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        self.cache.write(slot, tokens)

    def read(self, slot: int) -> list[int]:
        return list(self.cache.context(slot))


def entries_of(tokens: Sequence[int]) -> Tensor:
    """Keys [L, H, T, D]: the token, and a share that tells layers and heads apart."""
    layers, heads = torch.arange(SHAPE.num_layers), torch.arange(SHAPE.num_kv_heads)
    share_LH = (layers[:, None] * 8 + heads[None, :]) / 64
    key_LHT1 = (torch.tensor(tokens) + share_LH[..., None])[..., None]
    return key_LHT1.expand(-1, -1, -1, SHAPE.head_dim)


def tokens_of(keys_LHTD: Tensor, values_LHTD: Tensor) -> list[int]:
    """The argument of `entries_of`, if all numbers of all entries agree."""
    tokens = [int(key) for key in keys_LHTD[0, 0, :, 0].round()]
    assert torch.equal(keys_LHTD, entries_of(tokens))
    assert torch.equal(values_LHTD, -keys_LHTD)
    return tokens


class KVProbe:
    def __init__(self, max_length: int = 2000, max_tokens: int = 100_000) -> None:
        memory = max_tokens * SHAPE.bytes_per_token(torch.float32)
        self.cache = KVCache(SHAPE, torch.float32, "cpu", max_length, memory)

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        self.cache.reserve(slot, len(tokens))
        self.cache.will_write(slot, len(tokens))
        store, table, first = self.cache.store, self.cache.table(slot), self.cache.length(slot)
        for layer, keys_HTD in enumerate(entries_of(tokens)):
            store.put(layer, table, first, keys_HTD, -keys_HTD)

    def read(self, slot: int) -> list[int]:
        store, table, end = self.cache.store, self.cache.table(slot), self.cache.length(slot)
        if end == 0:
            return []
        layers = [store.get(layer, table, end) for layer in range(SHAPE.num_layers)]
        keys, values = (torch.stack(part) for part in zip(*layers, strict=True))
        return tokens_of(keys, values)


class HFProbe:
    def __init__(self) -> None:
        self.cache = HFCache(lambda: [SlotLayer() for _ in range(SHAPE.num_layers)])

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        past = self.cache.open(slot)
        for layer, keys_HTD in enumerate(entries_of(tokens)):
            past.update(keys_HTD[None], -keys_HTD[None], layer)

    def read(self, slot: int) -> list[int]:
        if self.cache.length(slot) == 0:
            return []
        layers = self.cache.open(slot).layers
        keys, values = (
            [getattr(layer, name)[0] for layer in layers] for name in ("keys", "values")
        )
        return tokens_of(torch.stack(keys), torch.stack(values))


def test_what_is_not_there_cannot_be_cut_off(probe: Probe) -> None:
    slot = probe.cache.allocate()
    probe.write(slot, [1, 9])
    probe.cache.keep(slot, 2, ())
    for length in (3, -1):
        with pytest.raises(ValueError, match="cannot truncate 2 entries"):
            probe.cache.truncate(slot, length)


def test_a_slot_that_is_not_allocated_is_an_error(probe: Probe) -> None:
    cache, slot = probe.cache, probe.cache.allocate()
    cache.free(slot)
    for use in (
        lambda: cache.length(slot),
        lambda: cache.keep(slot, 0, ()),
        lambda: cache.truncate(slot, 0),
        lambda: cache.fork(slot),
        lambda: cache.free(slot),
    ):
        with pytest.raises(KeyError):
            use()


@pytest.mark.parametrize(
    ("num_pending", "path", "message"),
    [
        (8, (), "cannot keep 8 pending tokens of 7 written"),
        (-1, (), "cannot keep -1 pending tokens"),
        (2, (5,), "leads out of a tree of 5 nodes"),
        (7, (0,), "leads out of a tree of 0 nodes"),
        (2, (-1,), "node numbers rise from 0 on"),
        (2, (1, 1), "node numbers rise"),
        (2, (2, 0), "node numbers rise"),
    ],
)
def test_what_was_not_written_cannot_be_kept(
    probe: Probe, num_pending: int, path: Sequence[int], message: str
) -> None:
    slot = probe.cache.allocate()
    probe.write(slot, [1])
    probe.cache.keep(slot, 1, ())
    probe.write(slot, [7, 8, 50, 51, 52, 53, 54])
    with pytest.raises(ValueError, match=message):
        probe.cache.keep(slot, num_pending, path)
    probe.cache.keep(slot, 2, (1, 4))  # nothing has changed
    assert probe.read(slot) == [1, 7, 8, 51, 54]


@pytest.mark.parametrize("new", [TokenProbe, KVProbe])
def test_without_memory_nothing_changes(new: Callable[..., Probe]) -> None:
    probe = new(max_tokens=200)
    slot, other = probe.cache.allocate(), probe.cache.allocate()
    probe.write(slot, [1, 2])
    probe.cache.keep(slot, 2, ())
    probe.cache.reserve(other, 100)
    copy = probe.cache.fork(slot)
    for full in (slot, copy, other):
        with pytest.raises(CacheFullError, match=r"no room for .* 192 that its memory allows"):
            probe.cache.reserve(full, 1000)
    with pytest.raises(CacheFullError):
        probe.cache.reserve(copy, 1)  # a copy of a block that is shared
    assert (probe.read(slot), probe.read(copy)) == ([1, 2], [1, 2])
    probe.cache.check()
    probe.cache.free(other)
    probe.write(copy, [3])
    probe.cache.keep(copy, 1, ())
    assert (probe.read(slot), probe.read(copy)) == ([1, 2], [1, 2, 3])


def test_a_store_that_was_given_little_moves_without_losing_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the system promises no memory ahead of its use, and on GPUs."""
    probe, resize = KVProbe(), BlockStore._resize
    slot = probe.cache.allocate()

    def few_at_once(store: BlockStore, count: int) -> None:
        if count > 40:
            raise RuntimeError("not enough memory")
        resize(store, count)

    monkeypatch.setattr(BlockStore, "_resize", few_at_once)
    for start in range(0, 600, 50):
        probe.write(slot, range(start, start + 50))
        probe.cache.keep(slot, 50, ())
    assert probe.read(slot) == [*range(600)]
    assert probe.cache.store.num_blocks < 40


def test_reserves_up_to_its_limit_and_not_beyond() -> None:
    probe = KVProbe(max_length=300)
    slot = probe.cache.allocate()
    probe.cache.reserve(slot, 300)
    with pytest.raises(ValueError, match="301 cache entries wanted; a slot holds 300"):
        probe.cache.reserve(slot, 301)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 6)))]
    return TokenTree(tuple(range(500, 500 + len(parents))), tuple(parents))


@settings(max_examples=90)
@given(data=st.data(), new=st.sampled_from([TokenProbe, KVProbe, HFProbe]))
def test_holds_what_a_list_would_hold(data: st.DataObject, new: Callable[[], Probe]) -> None:
    probe, lists = new(), dict[int, list[int]]()
    for step in range(data.draw(st.integers(1, 25), label="steps")):
        actions = ["allocate"] + (["forward"] * 4 + ["truncate", "fork", "free"]) * bool(lists)
        action = data.draw(st.sampled_from(actions), label="action")
        if action == "allocate":
            slot = probe.cache.allocate()
            assert slot not in lists
            lists[slot] = []
            continue
        slot = data.draw(st.sampled_from(sorted(lists)), label="slot")
        if action == "forward":
            pending = [step * 8 + i for i in range(data.draw(st.integers(0, 5), label="pending"))]
            tree = data.draw(trees(), label="tree")
            path = data.draw(st.sampled_from([(), *tree.paths]), label="path")
            probe.write(slot, [*pending, *tree.tokens])
            probe.cache.keep(slot, len(pending), path)
            lists[slot] += [*pending, *(tree.tokens[node] for node in path)]
        elif action == "truncate":
            length = data.draw(st.integers(0, len(lists[slot])), label="length")
            probe.cache.truncate(slot, length)
            del lists[slot][length:]
        elif action == "fork":
            lists[probe.cache.fork(slot)] = list(lists[slot])
        else:
            probe.cache.free(slot)
            del lists[slot]
        assert {slot: probe.read(slot) for slot in lists} == lists
        assert all(probe.cache.length(slot) == len(held) for slot, held in lists.items())


def test_usage_is_read_while_another_thread_changes_slots() -> None:
    probe, ends = HFProbe(), threading.Event()

    def look() -> set[int]:
        found = set()
        while not ends.is_set():
            found.add(probe.cache.usage.used)
        return found

    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look)
        try:
            for round in range(300):
                slot, _ = probe.cache.share(b"somebody", [])
                probe.write(slot, [1, 2, round])
                probe.cache.keep(slot, 3, ())
                probe.cache.retire(slot, [1, 2, round])
        finally:
            ends.set()
    assert looked.result() <= {0, 64}
    assert probe.cache.usage.used == 0
