"""The key-value cache: one contiguous stretch per slot, compacted in place after each step.

Shape legend: L layers, S slots, H key-value heads, C capacity (tokens), D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.cache.base import KVShape, SlotLengths, check_keep, padded_capacity
from foredraft.cache.layers import AddedLayers, StoredLayers, check_fits, resized


class KVCache:
    """Keys and values [L, S, H, C, D], grown on demand (see `foredraft.cache.base.Cache`).

    Args:
        shape: the model's cache shape.
        dtype: of keys and values.
        device: where they live.
        max_length: the most tokens a slot may hold.
    """

    def __init__(
        self, shape: KVShape, dtype: torch.dtype, device: torch.device | str, max_length: int
    ) -> None:
        self.shape = shape
        self._max_length = max_length
        self._lengths = SlotLengths()
        self._written: dict[int, int] = {}  # entries behind those that count, by slot
        self._ends: dict[int, int] = {}  # of all that was ever written to a slot, by any user
        self._added = AddedLayers(device)
        self._holds_memory = False
        empty = (shape.num_layers, 0, shape.num_kv_heads, 0, shape.head_dim)
        self.keys_LSHCD = torch.zeros(empty, dtype=dtype, device=device)
        self.values_LSHCD = torch.zeros(empty, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        return self.keys_LSHCD.shape[3]

    @property
    def num_bytes(self) -> int:
        own = 2 * self.keys_LSHCD.numel() * self.keys_LSHCD.dtype.itemsize
        return own + self._added.num_bytes

    def check_fits(self, shape: KVShape, dtype: torch.dtype) -> None:
        """Refuse to serve a model that would write something else than there is room for.

        Raises:
            ConfigError: the cache has another shape or dtype.
        """
        check_fits(self.shape, self.keys_LSHCD.dtype, shape, dtype)

    def allocate(self) -> int:
        slot = self._lengths.open()
        try:
            self._grow(max(slot + 1, self.keys_LSHCD.shape[1]), self.capacity)
        except BaseException:  # no memory: the slot is not handed out
            self._lengths.close(slot)
            raise
        self._written[slot] = 0
        self._added.open(slot)
        return slot

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def revision(self, slot: int) -> int:
        """Tells whether uncommitted entries of ``slot`` are still those that were written."""
        return self._lengths.revision(slot)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` entries behind the ones that count.

        Raises:
            ValueError: a slot may not hold that many.
            MemoryError, RuntimeError: there is no memory left; nothing has changed then.
        """
        needed = self._lengths[slot] + num_tokens
        if needed > self._max_length:
            raise ValueError(f"{needed} cache entries wanted; a slot holds {self._max_length}")
        if needed > self.capacity:
            self.make_room(max(needed, min(self.capacity * 3 // 2, self._max_length)))

    def will_write(self, slot: int, num_tokens: int) -> None:
        """A forward is about to write ``num_tokens`` entries, for which there is room.

        What an earlier one wrote there without being kept is no longer to be relied on.
        """
        self._lengths.touch(slot)
        self._written[slot] = num_tokens
        end = self._lengths[slot] + num_tokens
        self._ends[slot] = max(end, self._ends.get(slot, 0))

    def clear_behind(self, slot: int, end: int) -> None:
        """Zero what earlier forwards and users of the slot left from ``end`` on.

        For those who read more than they may see: a weight of 0 does not cancel a NaN.
        """
        stale = slice(end, self._ends.get(slot, 0))
        if stale.start < stale.stop:
            for store in (self.keys_LSHCD, self.values_LSHCD):
                store[:, slot, :, stale] = 0.0
            self._ends[slot] = end

    def fill(self, slot: int, num_tokens: int) -> None:
        """Count ``num_tokens`` empty entries behind those that count: to time a long context.

        Raises:
            ValueError, MemoryError, RuntimeError: as `reserve`.
        """
        self.reserve(slot, num_tokens)
        self.will_write(slot, num_tokens)
        self.clear_behind(slot, self._lengths[slot])
        self.keep(slot, num_tokens, ())

    def make_room(self, num_entries: int) -> None:
        """Hold at least ``num_entries`` in every slot, whether or not they will ever count."""
        if num_entries > self.capacity:
            self._grow(self.keys_LSHCD.shape[1], padded_capacity(num_entries))

    def hold_memory(self) -> None:
        """From now on keep the memory when the last slot is freed: its address is recorded."""
        self._holds_memory = True

    def add_layers(self, shape: KVShape, dtype: torch.dtype) -> StoredLayers:
        return self._added.add(shape, dtype, self._lengths.slots)

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        start = self._lengths[slot]
        check_keep(num_pending, path, self._written[slot])
        first = start + num_pending
        if list(path) != list(range(len(path))):
            source = torch.tensor([first + node for node in path], device=self.keys_LSHCD.device)
            target = slice(first, first + len(path))
            for store in (self.keys_LSHCD, self.values_LSHCD):
                # index_select copies before anything is overwritten, so the ranges may overlap.
                store[:, slot, :, target] = store[:, slot].index_select(2, source)
        self._set_length(slot, first + len(path))

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"cannot truncate {self._lengths[slot]} entries to {length}")
        self._set_length(slot, length)
        self._added.truncate(slot, length)

    def fork(self, slot: int) -> int:
        length, copy = self._lengths[slot], self.allocate()
        try:
            self._added.copy(slot, copy, length)
        except BaseException:  # no memory
            self.free(copy)
            raise
        for store in (self.keys_LSHCD, self.values_LSHCD):
            store[:, copy, :, :length] = store[:, slot, :, :length]
        self._set_length(copy, length)
        self._ends[copy] = max(length, self._ends.get(copy, 0))
        return copy

    def free(self, slot: int) -> None:
        self._lengths.close(slot)
        del self._written[slot]
        self._added.close(slot)
        if not len(self._lengths) and not self._holds_memory:
            self._grow(0, 0)
            self._ends.clear()

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        self._written[slot] = 0

    def _grow(self, slots: int, capacity: int) -> None:
        self.keys_LSHCD, self.values_LSHCD = resized(
            self.keys_LSHCD, self.values_LSHCD, slots, capacity
        )
