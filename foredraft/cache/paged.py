"""The paged cache without its entries: slots, block tables, sharing and copy-on-write."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from weakref import WeakSet

import torch

from foredraft.cache.base import CacheUsage, KVShape, check_keep
from foredraft.cache.blocks import BLOCK, BlockPool
from foredraft.cache.index import NamedBlock
from foredraft.cache.layers import StoredLayers
from foredraft.cache.memory import CacheMemory
from foredraft.cache.slots import Slot
from foredraft.cache.store import BlockStore
from foredraft.core.errors import CacheFullError


class Cache:
    """A store of per-token state for several rows ("slots") of different lengths.

    A forward writes the entries of its pending tokens and tree nodes behind the valid ones, in that
    order; `keep` then makes some of them valid. Subclasses define the entries.

    Args:
        max_length: the most tokens a slot may hold.
        memory: the limit of all entries, including those of added layers.
        block_size: entries of a block, which `publish` lets others find once it is full.
        device: where added layers live.

    Attributes:
        rewinds: how many committed tokens `truncate` takes back without going further: 0, or what a
            drafter sets that commits its guesses.
    """

    def __init__(
        self,
        max_length: int,
        memory: CacheMemory,
        block_size: int = BLOCK,
        device: torch.device | str = "cpu",
    ) -> None:
        self._max_length, self._device = max_length, device
        self.rewinds = 0
        self.memory, self.block_size = memory, block_size
        self._slots: dict[int, Slot] = {}
        self._revisions = itertools.count()
        self._layers: WeakSet[StoredLayers] = WeakSet()
        self.pool = BlockPool(self._most_blocks, block_size)

    def _make_room(self, blocks: Sequence[int]) -> None:
        """Make room for blocks that are about to be handed out."""

    def _copy_block(self, source: int, target: int) -> None:
        """Copy all entries of a block."""

    def _move(self, slot: int, sources: Sequence[int], first: int) -> None:
        """Copy entries of a slot to ``first`` and following; ranges may overlap."""

    def _release(self) -> None:
        """Free the memory; all blocks are free."""
        self.pool.start_over()
        for layers in self._layers:
            layers.release()

    @property
    def slots(self) -> list[int]:
        """The allocated slots."""
        return list(self._slots)

    @property
    def usage(self) -> CacheUsage:
        """Use of the cache's memory."""
        return self.pool.usage

    def check(self) -> None:
        """Check the accounts: every block is free, cached, or used by exactly the slots that list
        it.

        Raises:
            AssertionError: they are not. This is a bug of foredraft.
        """
        self.pool.check([slot.table for slot in self._slots.values()])
        for number in self._slots:
            slot = self._slots[number]
            held, there = slot.length + slot.written, len(slot.table) * self.block_size
            assert held <= there, f"slot {number} counts {held} entries and has blocks for {there}"

    def table(self, slot: int) -> array[int]:
        """The slot's blocks, as C integers. Do not change it, nor keep it while slots change."""
        return self._slots[slot].table

    def slot(self, number: int) -> Slot:
        """The state of a slot, for added layers.

        Raises:
            KeyError: it is not allocated.
        """
        return self._slots[number]

    def allocate(self) -> int:
        """A new empty slot, of the lowest free number, whose text is never shared."""
        number = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
        self._slots[number] = Slot(next(self._revisions))
        return number

    def length(self, slot: int) -> int:
        """Number of valid entries of ``slot``."""
        return self._slots[slot].length

    def revision(self, slot: int) -> int:
        """Changes whenever uncommitted entries of ``slot`` may have changed."""
        return self._slots[slot].revision

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` entries behind the valid ones.

        Raises:
            ValueError: a slot may not hold that many.
            CacheFullError: they do not fit into the cache's memory, even without all that is
                cached.
            MemoryError, RuntimeError: the system gives no more. Nothing has changed in any case.
        """
        length = self._slots[slot].length
        if length + num_tokens > self._max_length:
            raise ValueError(
                f"{length + num_tokens} cache entries wanted; a slot holds {self._max_length}"
            )
        self.own(slot, length, length + num_tokens)

    def will_write(self, slot: int, num_tokens: int) -> None:
        """Note that a forward is about to write ``num_tokens`` entries, for which there is room.

        Entries that an earlier forward wrote there and that were not kept become invalid.
        """
        state = self._slots[slot]
        state.revision, state.written = next(self._revisions), num_tokens

    def add_layers(self, shape: KVShape, dtype: torch.dtype) -> StoredLayers:
        """Further layers of this shape; see `Capabilities.cache_layers`.

        A step may be under way in another thread; two callers at once must take turns.
        """
        layers = StoredLayers(BlockStore(shape, dtype, self._device, self.block_size), self)
        self._layers = WeakSet((*self._layers, layers))  # a step may be going through the old one
        self.memory.add(layers, shape.bytes_per_token(dtype))
        return layers

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        """Commit the pending tokens and the tree nodes of ``path`` of the last forward.

        Entries of all other nodes are dropped.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: ``num_pending`` and ``path`` do not match the written entries; nothing has
                changed then.
        """
        state = self._slots[slot]
        check_keep(num_pending, path, state.written)
        first = state.length + num_pending
        if list(path) != list(range(len(path))):
            self._move(slot, [first + node for node in path], first)
        self._set_length(state, first + len(path))

    def truncate(self, slot: int, length: int) -> int:
        """Forget all entries from ``length`` on; returns how many are left.

        These may be fewer: a recurrent layer's state can only go back to where one was kept.
        """
        state = self._slots[slot]
        if not 0 <= length <= state.length:
            raise ValueError(f"cannot truncate {state.length} entries to {length}")
        self._set_length(state, length)
        first = -(-length // self.block_size)
        self.pool.give_back(state.table[first:])
        del state.table[first:]
        del state.names[length // self.block_size :]
        for run in state.runs.values():
            run.cut(length)
        if state.table and not self.pool.is_shared(state.table[-1]):
            self._cut_notes(state, len(state.table) - 1)
        return length

    def fork(self, slot: int) -> int:
        """A new slot with the same entries; the two are independent afterwards."""
        state, number = self._slots[slot], self.allocate()
        copy = self._slots[number]
        copy.owner = state.owner
        self._adopt(copy, state.table[: -(-state.length // self.block_size)], state.length)
        copy.names = list(state.names)
        for layers, run in state.runs.items():
            layers.take_over(copy, run)
        return number

    def share(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """A new slot with the longest beginning of a text that is cached, and its length.

        Args:
            owner: 32 bytes that name the text's owner. Text cached by other owners is not found.
                The slot and its forks keep the owner.
        """
        nodes, length = self._found(owner, tokens)
        number = self.allocate()
        state = self._slots[number]
        state.owner = owner
        self._adopt(state, array("i", [node.block for node in nodes]), length)
        state.names = [node.name for node in nodes[: length // self.block_size]]
        for layers in self._layers:
            layers.adopt(state)
        return number, length

    def num_shared(self, owner: bytes, tokens: Sequence[int]) -> int:
        """Number of tokens that `share` would find now."""
        return self._found(owner, tokens)[1]

    def _found(self, owner: bytes, tokens: Sequence[int]) -> tuple[list[NamedBlock], int]:
        """The blocks of the longest beginning of a text that a slot can begin with."""
        return self.pool.index.find(owner, tokens)

    def publish(self, slot: int, tokens: Sequence[int]) -> None:
        """Publish the slot's full blocks for sharing, while the slot stays in use.

        Blocks of a slot without an owner (see `allocate`) are not published.

        Args:
            tokens: the slot's text, at least that of the valid entries.
        """
        state = self._slots[slot]
        if state.owner is None:
            return
        size = self.block_size
        if state.names and self.pool.index.full(state.names[-1]) is None:
            state.names.clear()  # the blocks before it were another slot's, and they were evicted
        for index in range(len(state.names), min(state.length, len(tokens)) // size):
            text = tokens[index * size : (index + 1) * size]
            state.names.append(self._publish_block(state, index, text).name)

    def retire(self, slot: int, tokens: Sequence[int]) -> None:
        """Free the slot, but keep its first entries cached until their memory is needed.

        Args:
            tokens: the text of the entries to keep, at most the valid ones.
        """
        state = self._slots[slot]
        if len(tokens) > state.length:
            raise ValueError(
                f"slot {slot} counts {state.length} entries, not those of {len(tokens)}"
            )
        self.publish(slot, tokens)
        blocks = list[int]()
        if state.owner is not None:
            full, size = len(tokens) // self.block_size, self.block_size
            nodes = map(self.pool.index.full, state.names[:full])
            blocks = [node.block for node in nodes if node is not None]
            if rest := tokens[full * size :]:
                del state.names[full:]
                blocks.append(self._publish_block(state, full, rest).block)
        self.free(slot)
        self.pool.index.touch(blocks)  # its own, and those of others that hold the same

    def distrust(self) -> None:
        """Some entries are bad: find none of those that are there now again.

        Texts in use keep theirs, and are not published any more: what they compute may come from
        bad entries.
        """
        self.pool.distrust()
        for state in self._slots.values():
            state.owner = None
            state.names.clear()

    def free(self, slot: int) -> None:
        """Give the slot back; its number may be handed out again."""
        self.pool.give_back(self._slots.pop(slot).table)
        self._release_if_idle()

    def forget(self) -> None:
        """Evict all cached entries."""
        self.pool.forget()
        self._release_if_idle()

    def own(self, slot: int, start: int, end: int) -> None:
        """Prepare the entries ``start`` to ``end`` for writing: copy shared blocks (copy-on-write).

        Raises:
            CacheFullError: there are no blocks left.
            MemoryError, RuntimeError: there is no memory for them. Nothing has changed then.
        """
        state, size = self._slots[slot], self.block_size
        table, num_blocks = state.table, -(-end // size)
        held = range(min(start // size, len(table)), min(num_blocks, len(table)))
        shared = [index for index in held if self.pool.is_shared(table[index])]
        num_new = max(0, num_blocks - len(table))
        if not shared and not num_new:
            return
        try:
            blocks = self._new_blocks([table[index] for index in shared], num_new)
        except CacheFullError:
            mine = [index for index in shared if self.pool.num_users(table[index]) == 1]
            if not mine:
                raise
            # No other slot uses these: they are only published for sharing, and are unpublished
            # now.
            shared = [index for index in shared if index not in mine]
            blocks = self._new_blocks([table[index] for index in shared], num_new)
            for index in mine:
                if table[index] in self.pool.index:  # not gone along with one before it
                    self.pool.unpublish(table[index])
                self._cut_notes(state, index)
        for index, block in zip(shared, blocks, strict=False):
            self.pool.give_back([table[index]])
            table[index] = block
            self._cut_notes(state, index)
        table.extend(blocks[len(shared) :])

    def _publish_block(self, state: Slot, index: int, text: Sequence[int]) -> NamedBlock:
        """Publish one of a slot's blocks, or another with as much of the text."""
        assert state.owner is not None
        before = state.names[index - 1] if index else state.owner
        block = state.table[index]
        node = self.pool.publish(before, text, block)
        if node.block == block or len(node.tokens) > len(text) or block in self.pool.index:
            return node
        if sum(layers.num_held(block) - layers.num_held(node.block) for layers in self._layers) > 0:
            return self.pool.exchange(node, block)
        return node

    def _adopt(self, state: Slot, blocks: array[int], length: int) -> None:
        """Let an empty slot begin with shared blocks."""
        self.pool.share(blocks)
        state.table.extend(blocks)
        self._set_length(state, length)

    def _set_length(self, state: Slot, length: int) -> None:
        state.length, state.written = length, 0
        state.revision = next(self._revisions)

    def _cut_notes(self, state: Slot, index: int) -> None:
        """After copy-on-write: trim the block's valid length to the slot's."""
        for layers in self._layers:
            layers.cut_note(state.table[index], max(0, state.length - index * self.block_size))

    def _most_blocks(self) -> int:
        return self.memory.num_tokens // self.block_size

    def _new_blocks(self, to_copy: Sequence[int], num_empty: int) -> list[int]:
        blocks = self.pool.take(len(to_copy) + num_empty)
        try:
            for layers in self._layers:
                layers.forget_notes(blocks)
            self._make_room(blocks)
            for source, target in zip(to_copy, blocks, strict=False):
                self._copy_block(source, target)
                for layers in self._layers:
                    layers.copy_block(source, target)
        except BaseException:
            self.pool.give_back(blocks)
            raise
        return blocks

    def _release_if_idle(self) -> None:
        if self.pool.is_idle:
            self._release()
