"""Further layers beside a cache, for drafters that keep a state for each token.

Shape legend: L layers, S slots, H key-value heads, C capacity (tokens), T tokens, D head size.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor

from foredraft.cache.base import KVShape, padded_capacity
from foredraft.core.errors import ConfigError


class StoredLayers:
    """Keys and values [L, S, H, C, D], grown when written (see `CacheLayers`).

    What was never written for a slot cannot be read from it: not zeros, and nothing of a slot's
    former user.

    Args:
        shape: of one token's entry.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device | str) -> None:
        self.shape = shape
        empty = (shape.num_layers, 0, shape.num_kv_heads, 0, shape.head_dim)
        self.keys_LSHCD = torch.zeros(empty, dtype=dtype, device=device)
        self.values_LSHCD = torch.zeros(empty, dtype=dtype, device=device)
        self._ends: dict[int, list[int]] = {}  # of the written positions, by slot and layer

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys_LSHCD.numel() * self.keys_LSHCD.dtype.itemsize

    @property
    def capacity(self) -> int:
        return self.keys_LSHCD.shape[3]

    def check_fits(self, shape: KVShape, dtype: torch.dtype) -> None:
        """Refuse to serve layers that would write something else than there is room for.

        Raises:
            ConfigError: the store has another shape or dtype.
        """
        check_fits(self.shape, self.keys_LSHCD.dtype, shape, dtype)

    def reserve(self, slot: int, num_entries: int) -> None:
        """Make room for ``num_entries`` in all, for one who writes past `write`.

        Raises:
            KeyError: the slot is not allocated.
            MemoryError, RuntimeError: there is no memory left; nothing has changed then.
        """
        self._end(0, slot)
        self._make_room(slot, num_entries)

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
        self._make_room(slot, end)
        self.keys_LSHCD[layer, slot, :, start:end] = keys_HTD
        self.values_LSHCD[layer, slot, :, start:end] = values_HTD
        self._ends[slot][layer] = max(written, end)

    def read(self, layer: int, slot: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, end, D] of the positions before ``end``. Do not change them.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: the layer does not exist, or not all of these positions were written.
        """
        written = self._end(layer, slot)
        if not 0 <= end <= written:
            raise ValueError(f"{end} entries wanted; layer {layer} of slot {slot} holds {written}")
        seen = (layer, slot, slice(None), slice(0, end))
        return self.keys_LSHCD[seen], self.values_LSHCD[seen]

    def covered(self, slot: int) -> int:
        """Leading positions that all of these layers hold."""
        return min(self._ends[slot], default=0)

    def open(self, slot: int) -> None:
        self._ends[slot] = [0] * self.shape.num_layers

    def truncate(self, slot: int, length: int) -> None:
        self._ends[slot] = [min(end, length) for end in self._ends[slot]]

    def copy(self, slot: int, copy: int, length: int) -> None:
        """Let ``copy`` hold what ``slot`` holds before ``length``."""
        ends = [min(end, length) for end in self._ends[slot]]
        if longest := max(ends, default=0):
            self._make_room(copy, longest)
            for store in (self.keys_LSHCD, self.values_LSHCD):
                store[:, copy, :, :longest] = store[:, slot, :, :longest]
        self._ends[copy] = ends

    def close(self, slot: int) -> None:
        del self._ends[slot]
        if not self._ends:
            self._resize(0, 0)

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

    def _make_room(self, slot: int, num_entries: int) -> None:
        slots, capacity = self.keys_LSHCD.shape[1], self.keys_LSHCD.shape[3]
        if num_entries > capacity:
            capacity = padded_capacity(max(num_entries, capacity * 3 // 2))
        self._resize(max(slots, slot + 1), capacity)

    def _resize(self, slots: int, capacity: int) -> None:
        self.keys_LSHCD, self.values_LSHCD = resized(
            self.keys_LSHCD, self.values_LSHCD, slots, capacity
        )


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

    def add(self, shape: KVShape, dtype: torch.dtype, slots: list[int]) -> StoredLayers:
        """Further layers; ``slots`` are those that are allocated already."""
        layers = StoredLayers(shape, dtype, self._device)
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


def check_fits(held: KVShape, held_dtype: torch.dtype, shape: KVShape, dtype: torch.dtype) -> None:
    """See `StoredLayers.check_fits`."""
    if (held, held_dtype) != (shape, dtype):
        raise ConfigError(
            f"a model with {dtype} entries of {shape} cannot use a cache of {held_dtype} entries "
            f"of {held}: make it of the model's own"
        )


def resized(
    keys_LSHCD: Tensor, values_LSHCD: Tensor, slots: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Both stores with room for ``slots`` of ``capacity``, or themselves if they have just that.

    If there is no memory for one of them, neither has changed.
    """
    if (slots, capacity) == (keys_LSHCD.shape[1], keys_LSHCD.shape[3]):
        return keys_LSHCD, values_LSHCD
    return _resized(keys_LSHCD, slots, capacity), _resized(values_LSHCD, slots, capacity)


def _resized(store_LSHCD: Tensor, slots: int, capacity: int) -> Tensor:
    num_layers, old_slots, num_heads, old_capacity, head_dim = store_LSHCD.shape
    grown = store_LSHCD.new_zeros((num_layers, slots, num_heads, capacity, head_dim))
    s, c = min(slots, old_slots), min(capacity, old_capacity)
    grown[:, :s, :, :c] = store_LSHCD[:, :s, :, :c]
    return grown
