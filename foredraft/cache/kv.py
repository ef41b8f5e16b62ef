"""The key-value cache of a native model, in blocks that slots share and copy when they write.

Shape legend: L layers, H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.cache.base import KVShape
from foredraft.cache.blocks import BLOCK
from foredraft.cache.memory import default_memory
from foredraft.cache.paged import PagedCache
from foredraft.cache.store import BlockStore


class KVCache(PagedCache):
    """Keys and values of tokens (see `foredraft.cache.base.Cache`).

    Args:
        shape: the model's cache shape.
        dtype: of keys and values.
        device: where they live.
        max_length: the most tokens a slot may hold.
        memory: bytes that entries may take; None: a share of the memory there is.
        block_size: entries of a block.
    """

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device | str,
        max_length: int,
        memory: int | None = None,
        block_size: int = BLOCK,
    ) -> None:
        self.store = BlockStore(shape, dtype, device, block_size)
        memory = default_memory(device) if memory is None else memory
        super().__init__(max_length, device, memory, block_size)
        self._ends: dict[int, int] = {}  # of all that a slot's forwards ever wrote
        self._keeps_clean = self._holds_memory = False

    @property
    def shape(self) -> KVShape:
        return self.store.shape

    @property
    def block_bytes(self) -> int:
        return self.store.block_bytes

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return self.store.num_bytes(self.tables.pool.num_made) + self._added.num_bytes

    def will_write(self, slot: int, num_tokens: int) -> None:
        super().will_write(slot, num_tokens)
        self._ends[slot] = max(self._lengths[slot] + num_tokens, self._ends.get(slot, 0))

    def fill(self, slot: int, num_tokens: int) -> None:
        """Count ``num_tokens`` empty entries behind those that count: to time a long context.

        Raises:
            ValueError, MemoryError, RuntimeError: as `reserve`.
        """
        self.reserve(slot, num_tokens)
        self.will_write(slot, num_tokens)
        start = self._lengths[slot]
        self.store.clear_entries(self.table(slot), range(start, start + num_tokens))
        self.keep(slot, num_tokens, ())

    def keep_clean(self) -> None:
        """From now on zero blocks that are handed out: someone reads more than it may see.

        A weight of 0 does not cancel a NaN.
        """
        self._keeps_clean = True

    def clear_behind(self, slot: int, end: int) -> None:
        """Zero what earlier forwards of the slot left from ``end`` on, for the same reader."""
        stale = min(self._ends.get(slot, 0), self.tables.num_entries(slot))
        if end < stale:
            self.store.clear_entries(self.table(slot), range(end, stale))
        self._ends[slot] = end

    def hold_memory(self) -> None:
        """From now on keep the memory when the last slot is freed: its address is recorded."""
        self._holds_memory = True

    def fork(self, slot: int) -> int:
        copy = super().fork(slot)
        self._ends[copy] = self.tables.num_entries(copy)
        return copy

    def share(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        slot, length = super().share(owner, tokens)
        self._ends[slot] = self.tables.num_entries(slot)
        return slot, length

    def free(self, slot: int) -> None:
        super().free(slot)
        self._ends.pop(slot, None)

    def _make_room(self, blocks: Sequence[int]) -> None:
        pool = self.tables.pool
        self.store.make_room(pool.num_made, pool.num_total)
        if self._keeps_clean:
            self.store.clear(blocks)

    def _copy_block(self, source: int, target: int) -> None:
        self.store.copy(source, target)

    def _move(self, slot: int, sources: Sequence[int], first: int) -> None:
        self.store.move(self.table(slot), sources, first)

    def _release(self) -> None:
        if not self._holds_memory:
            super()._release()
            self.store.release()
