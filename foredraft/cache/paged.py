"""What caches of blocks have in common, whatever their entries are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from foredraft.cache.base import CacheUsage, KVShape, SlotLengths, check_keep
from foredraft.cache.blocks import BLOCK, BlockTables
from foredraft.cache.layers import AddedLayers, StoredLayers


class PagedCache:
    """See `foredraft.cache.base.Cache`; those that derive from it say what an entry is.

    Args:
        max_length: the most tokens a slot may hold.
        device: where added layers live.
        memory: bytes that entries may take, those of added layers included; None: no limit.
        block_size: entries of a block.
    """

    def __init__(
        self,
        max_length: int,
        device: torch.device | str,
        memory: int | None,
        block_size: int = BLOCK,
    ) -> None:
        self._max_length, self._memory = max_length, memory
        self._lengths = SlotLengths()
        self._written: dict[int, int] = {}  # entries behind those that count, by slot
        self._added = AddedLayers(device)
        self.tables = BlockTables(self._limit, block_size, self._prepare, self._copy)

    @property
    def block_bytes(self) -> int:
        """Of a block of one's own entries."""
        raise NotImplementedError

    def _make_room(self, blocks: Sequence[int]) -> None:
        """Some blocks are about to be handed out."""

    def _copy_block(self, source: int, target: int) -> None:
        raise NotImplementedError

    def _move(self, slot: int, sources: Sequence[int], first: int) -> None:
        """Copy entries of a slot to ``first`` and following; ranges may overlap."""
        raise NotImplementedError

    def _release(self) -> None:
        """All blocks are free: give their memory back."""
        self.tables.pool.start_over()
        self._added.release()

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def slots(self) -> list[int]:
        """Those that are allocated."""
        return self._lengths.slots

    @property
    def usage(self) -> CacheUsage:
        return self.tables.usage()

    def check(self) -> None:
        self.tables.check()
        assert len(self.tables) == len(self._lengths), "slots without blocks of their own"
        for slot in self._lengths.slots:
            held, there = self._lengths[slot] + self._written[slot], self.tables.num_entries(slot)
            assert held <= there, f"slot {slot} counts {held} entries and has blocks for {there}"

    def table(self, slot: int) -> array[int]:
        """The slot's blocks (see `BlockTables`)."""
        return self.tables[slot]

    def allocate(self) -> int:
        slot = self._lengths.open()
        self._written[slot] = 0
        self.tables.open(slot)
        self._added.open(slot)
        return slot

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def revision(self, slot: int) -> int:
        """Tells whether uncommitted entries of ``slot`` are still those that were written."""
        return self._lengths.revision(slot)

    def reserve(self, slot: int, num_tokens: int) -> None:
        length = self._lengths[slot]
        if length + num_tokens > self._max_length:
            raise ValueError(
                f"{length + num_tokens} cache entries wanted; a slot holds {self._max_length}"
            )
        self.tables.own(slot, length, length + num_tokens)

    def will_write(self, slot: int, num_tokens: int) -> None:
        """A forward is about to write ``num_tokens`` entries, for which there is room.

        What an earlier one wrote there without being kept is no longer to be relied on.
        """
        self._lengths.touch(slot)
        self._written[slot] = num_tokens

    def add_layers(self, shape: KVShape, dtype: torch.dtype) -> StoredLayers:
        return self._added.add(shape, dtype, self.tables, self._lengths.slots)

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        start = self._lengths[slot]
        check_keep(num_pending, path, self._written[slot])
        first = start + num_pending
        if list(path) != list(range(len(path))):
            self._move(slot, [first + node for node in path], first)
        self._set_length(slot, first + len(path))

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"cannot truncate {self._lengths[slot]} entries to {length}")
        self._set_length(slot, length)
        self._added.truncate(slot, length)
        self.tables.cut(slot, length)

    def fork(self, slot: int) -> int:
        length, copy = self._lengths[slot], self.allocate()
        self.tables.share(slot, copy, length)
        self._added.copy(slot, copy, length)
        self._set_length(copy, length)
        return copy

    def share(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        slot = self.allocate()
        length = self.tables.find(slot, owner, tokens)
        self._set_length(slot, length)
        return slot, length

    def retire(self, slot: int, owner: bytes, tokens: Sequence[int]) -> None:
        if len(tokens) > self._lengths[slot]:
            raise ValueError(
                f"slot {slot} counts {self._lengths[slot]} entries, not those of {len(tokens)}"
            )
        named = self.tables.name(slot, owner, tokens)
        self.free(slot)
        self.tables.touch(named)  # its own, and those of others that hold the same

    def distrust(self, slot: int, owner: bytes, tokens: Sequence[int]) -> None:
        self.tables.unname(slot)

    def free(self, slot: int) -> None:
        self._lengths.close(slot)
        del self._written[slot]
        self.tables.close(slot)
        self._added.close(slot)
        self._release_if_idle()

    def forget(self) -> None:
        self.tables.forget()
        self._release_if_idle()

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        self._written[slot] = 0

    def _limit(self) -> int:
        """Blocks that there may be."""
        if self._memory is None:
            return 2**31 - 1
        return self._memory // max(1, self.block_bytes + self._added.block_bytes)

    def _prepare(self, blocks: Sequence[int]) -> None:
        self._make_room(blocks)

    def _copy(self, source: int, target: int) -> None:
        self._copy_block(source, target)
        self._added.copy_block(source, target)

    def _release_if_idle(self) -> None:
        if self.tables.pool.is_idle:
            self._release()
