"""Further layers beside a cache, for drafters that keep a state for each token.

Shape legend: H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from foredraft.cache.base import KVShape
from foredraft.cache.blocks import BlockTables
from foredraft.cache.store import BlockStore


class StoredLayers:
    """Entries in the same blocks as the cache's own (see `CacheLayers`).

    What was never written for a slot cannot be read from it: not zeros, and nothing of a block's
    former user.

    Args:
        store: holds them.
        tables: the blocks of each slot.
    """

    def __init__(self, store: BlockStore, tables: BlockTables) -> None:
        self.store, self._tables = store, tables
        self._ends: dict[int, list[int]] = {}  # of the written positions, by slot and layer

    @property
    def shape(self) -> KVShape:
        return self.store.shape

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes(self._tables.pool.num_made)

    def table(self, slot: int) -> array[int]:
        """The slot's blocks (see `BlockTables`)."""
        return self._tables[slot]

    def reserve(self, slot: int, start: int, end: int) -> None:
        """Make room for the entries ``start`` to ``end`` in all, for one who writes past `write`.

        Raises:
            KeyError: the slot is not allocated.
            CacheFullError, MemoryError, RuntimeError: there is no memory left; nothing has changed
                then.
        """
        self._end(0, slot)
        self._make_room(slot, start, end)

    def check_no_gap(self, slot: int, start: int) -> None:
        """Refuse entries from ``start`` on that would leave a gap behind those written before.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: they would.
        """
        for layer in range(self.shape.num_layers):
            self._check_start(layer, slot, start)

    def hold(self, slot: int, end: int) -> None:
        """The entries before ``end`` have been written in all layers, past `write`."""
        self._ends[slot] = [max(end, written) for written in self._ends[slot]]

    def write(
        self, layer: int, slot: int, start: int, keys_HTD: Tensor, values_HTD: Tensor
    ) -> None:
        """Set the entries of positions ``start`` to ``start + T``; makes room for them.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: the layer does not exist, the entries have another shape, or they would
                leave a gap behind those written before.
            CacheFullError, MemoryError, RuntimeError: as `reserve`.
        """
        written = self._end(layer, slot)
        expected = (self.shape.num_kv_heads, keys_HTD.shape[1], self.shape.head_dim)
        if not tuple(keys_HTD.shape) == tuple(values_HTD.shape) == expected:
            raise ValueError(
                f"keys {[*keys_HTD.shape]} and values {[*values_HTD.shape]} are not "
                f"[{expected[0]}, tokens, {expected[2]}]"
            )
        self._check_start(layer, slot, start)
        end = start + keys_HTD.shape[1]
        self._make_room(slot, start, end)
        self.store.put(layer, self._tables[slot], start, keys_HTD, values_HTD)
        self._ends[slot][layer] = max(written, end)

    def read(self, layer: int, slot: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, end, D] of the positions before ``end``: copies.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: the layer does not exist, or not all of these positions were written.
        """
        written = self._end(layer, slot)
        if not 0 <= end <= written:
            raise ValueError(f"{end} entries wanted; layer {layer} of slot {slot} holds {written}")
        return self.store.get(layer, self._tables[slot], end)

    def covered(self, slot: int) -> int:
        """Leading positions that all of these layers hold."""
        return min(self._ends[slot], default=0)

    def open(self, slot: int) -> None:
        self._ends[slot] = [0] * self.shape.num_layers

    def truncate(self, slot: int, length: int) -> None:
        self._ends[slot] = [min(end, length) for end in self._ends[slot]]

    def copy(self, slot: int, copy: int, length: int) -> None:
        """``copy`` has the blocks of what ``slot`` holds before ``length``."""
        self._ends[copy] = [min(end, length) for end in self._ends[slot]]

    def close(self, slot: int) -> None:
        del self._ends[slot]

    def copy_block(self, source: int, target: int) -> None:
        """The one is written where the other was shared."""
        if source < self.store.num_blocks:  # else these layers have nothing in it
            self._hold_blocks()
            self.store.copy(source, target)

    def _end(self, layer: int, slot: int) -> int:
        if slot not in self._ends:
            raise KeyError(f"cache slot {slot} is not allocated")
        if not 0 <= layer < self.shape.num_layers:
            raise ValueError(f"layer {layer} does not exist; there are {self.shape.num_layers}")
        return self._ends[slot][layer]

    def _check_start(self, layer: int, slot: int, start: int) -> None:
        """See `check_no_gap`."""
        if not 0 <= start <= (written := self._end(layer, slot)):
            raise ValueError(f"entries from {start} on leave a gap: slot {slot} holds {written}")

    def _make_room(self, slot: int, start: int, end: int) -> None:
        self._tables.own(slot, start, end)
        self._hold_blocks()

    def _hold_blocks(self) -> None:
        pool = self._tables.pool
        if pool.num_made > self.store.num_blocks:
            self.store.make_room(pool.num_made, pool.num_total)


class AddedLayers:
    """All further layers of one cache, which open, copy, truncate and close their slots as one.

    Held weakly: drafters come and go while the target stays, and their layers go with them.

    Args:
        device: where they live.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._all: WeakSet[StoredLayers] = WeakSet()

    @property
    def num_bytes(self) -> int:
        return sum(layers.num_bytes for layers in self._all)

    @property
    def block_bytes(self) -> int:
        return sum(layers.store.block_bytes for layers in self._all)

    def add(
        self, shape: KVShape, dtype: torch.dtype, tables: BlockTables, slots: Sequence[int]
    ) -> StoredLayers:
        """Further layers; ``slots`` are those that are allocated already."""
        layers = StoredLayers(BlockStore(shape, dtype, self._device, tables.block_size), tables)
        for slot in slots:
            layers.open(slot)
        self._all.add(layers)
        return layers

    def open(self, slot: int) -> None:
        for layers in self._all:
            layers.open(slot)

    def truncate(self, slot: int, length: int) -> None:
        for layers in self._all:
            layers.truncate(slot, length)

    def copy(self, slot: int, copy: int, length: int) -> None:
        for layers in self._all:
            layers.copy(slot, copy, length)

    def close(self, slot: int) -> None:
        for layers in self._all:
            layers.close(slot)

    def copy_block(self, source: int, target: int) -> None:
        for layers in self._all:
            layers.copy_block(source, target)

    def release(self) -> None:
        """Give all memory back: no slot is allocated, no block cached."""
        for layers in self._all:
            layers.store.release()
