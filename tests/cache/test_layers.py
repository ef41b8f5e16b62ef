"""Layers that a drafter adds to a cache: they live and die with its slots."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from foredraft.cache.base import KVShape
from foredraft.cache.layers import StoredLayers
from tests.cache.test_kv import SHAPE as KV_SHAPE
from tests.cache.test_kv import KVProbe, Probe, TokenProbe

SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=3)


def write(layers: StoredLayers, slot: int, start: int, values: list[int]) -> None:
    """Each position's entry is its value, in both layers (the second one's negative)."""
    keys_HTD = torch.tensor(values, dtype=torch.float32)[None, :, None].expand(1, -1, 3)
    for layer, sign in enumerate((1, -1)):
        layers.write(layer, slot, start, sign * keys_HTD, 2 * sign * keys_HTD)


def read(layers: StoredLayers, slot: int, end: int) -> list[int]:
    keys_HTD, values_HTD = layers.read(0, slot, end)
    assert keys_HTD.shape == (1, end, 3)
    assert torch.equal(values_HTD, 2 * keys_HTD)
    assert torch.equal(layers.read(1, slot, end)[0], -keys_HTD)
    return [int(value) for value in keys_HTD[0, :, 0]]


def grow(probe: Probe, slot: int, tokens: list[int]) -> None:
    probe.write(slot, tokens)
    probe.cache.keep(slot, len(tokens), ())


def test_layers_may_come_while_a_step_goes_through_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe: Probe = TokenProbe()
    cache, added = probe.cache, list[StoredLayers]()
    layers = [cache.add_layers(SHAPE, torch.float32) for _ in range(2)]
    forget_notes = StoredLayers.forget_notes

    def adding(self: StoredLayers, blocks: Sequence[int]) -> None:
        forget_notes(self, blocks)
        added.append(cache.add_layers(SHAPE, torch.float32))

    monkeypatch.setattr(StoredLayers, "forget_notes", adding)
    slot = cache.allocate()
    grow(probe, slot, [1, 2, 3])
    monkeypatch.undo()
    assert len(added) == len(layers)
    for each in (*layers, *added):
        write(each, slot, 0, [4, 5, 6])
        assert read(each, slot, 3) == [4, 5, 6]
    cache.free(slot)
    cache.check()


def test_a_type_of_its_own(probe: Probe) -> None:
    layers = probe.cache.add_layers(SHAPE, torch.bfloat16)
    slot = probe.cache.allocate()
    write(layers, slot, 0, [1])
    assert layers.read(0, slot, 1)[0].dtype == torch.bfloat16


def test_what_was_not_written_cannot_be_read(probe: Probe) -> None:
    layers = probe.cache.add_layers(SHAPE, torch.float32)
    slot = probe.cache.allocate()
    write(layers, slot, 0, [1, 2])
    with pytest.raises(ValueError, match="3 entries wanted; layer 0 of slot 0 holds 2"):
        layers.read(0, slot, 3)
    entry_HTD = torch.zeros(1, 1, 3)
    with pytest.raises(ValueError, match="layer 2 does not exist"):
        layers.write(2, slot, 0, entry_HTD, entry_HTD)
    with pytest.raises(ValueError, match="are not \\[1, tokens, 3\\]"):
        layers.write(0, slot, 0, entry_HTD, entry_HTD[..., :2])
    with pytest.raises(KeyError, match="1"):
        layers.read(0, 1, 0)
    write(layers, slot, 3, [4])  # behind a gap: what is before it is not seen any more
    assert (layers.first(slot), layers.covered(slot)) == (3, 4)
    with pytest.raises(ValueError, match="2 entries wanted"):
        layers.read(0, slot, 2)


def test_a_fork_is_independent(probe: Probe) -> None:
    layers, slot = probe.cache.add_layers(SHAPE, torch.float32), probe.cache.allocate()
    grow(probe, slot, [1, 2])
    write(layers, slot, 0, [1, 2, 90])  # the third is a guess: it does not count
    copy = probe.cache.fork(slot)
    with pytest.raises(ValueError, match="holds 2"):
        layers.read(0, copy, 3)
    write(layers, copy, 2, [3])
    assert (read(layers, copy, 3), read(layers, slot, 3)) == ([1, 2, 3], [1, 2, 90])
    probe.cache.free(slot)
    assert read(layers, copy, 3) == [1, 2, 3]


def test_layers_are_gone_with_their_owner(probe: Probe) -> None:
    """A target serves one drafter after another; what is left of them would add up."""
    layers, slot = probe.cache.add_layers(SHAPE, torch.float32), probe.cache.allocate()
    grow(probe, slot, [1, 2])
    write(layers, slot, 0, [1, 2])
    alive = weakref.ref(layers)
    del layers
    gc.collect()
    assert alive() is None
    copy = probe.cache.fork(slot)
    probe.cache.truncate(slot, 1)
    probe.cache.free(copy)
    assert probe.cache.length(slot) == 1


def test_memory_is_given_back() -> None:
    probe = KVProbe()
    layers, slot = probe.cache.add_layers(SHAPE, torch.float32), probe.cache.allocate()
    grow(probe, slot, [1])
    write(layers, slot, 0, [1])
    own = KV_SHAPE.bytes_per_token(torch.float32)
    assert probe.cache.num_bytes == 64 * (own + SHAPE.bytes_per_token(torch.float32))
    probe.cache.free(slot)
    assert probe.cache.num_bytes == 0
