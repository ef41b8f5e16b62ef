"""Extra layers beside a cache, for drafters that keep a state for each token.

Shape legend: H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from foredraft.cache.base import NO_MEMORY, KVShape
from foredraft.cache.slots import EntryRun, Slot
from foredraft.cache.store import BlockStore

if TYPE_CHECKING:
    from foredraft.cache.paged import Cache

MOST_REPEATED = 8
"""Most missing entries at the end of a cached beginning: a head that reads some tokens ahead writes
them late. The last entry before them is repeated, which affects drafts only."""


class StoredLayers:
    """Extra layers of a cache, for a drafter that keeps a state for each token.

    They hold entries for the same slots and positions as the cache itself, in the same blocks, and
    are allocated, forked, truncated and freed with it. Their owner writes them: those of committed
    tokens when it observes them, those of its guesses as it likes (nothing of them counts, and
    `Cache.keep` does not move them). The cache refers to them weakly: they are gone with their
    owner.

    A slot holds an unbroken run of entries. A slot that begins with blocks of an earlier request
    takes over what these layers hold of them, for the valid length of each block is noted: only
    entries that were written for a text can be read for it. Where they hold nothing of a cached
    beginning, the run begins behind it: see `next_start`.

    Args:
        store: holds them.
        cache: the cache whose blocks they lie in.
    """

    def __init__(self, store: BlockStore, cache: Cache) -> None:
        self.store, self._cache = store, cache
        self._notes: dict[int, int] = {}  # leading entries of a text that are there, by block

    @property
    def shape(self) -> KVShape:
        return self.store.shape

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes(self._cache.pool.num_made)

    def table(self, slot: int) -> array[int]:
        """The blocks of the slot's run, the first of which holds position `first`.

        Entries are counted from that block's beginning; the first `skipped` of them are missing.

        Do not change it, nor keep it while slots change.
        """
        run, state = self._run(slot), self._cache.slot(slot)
        if not run.first:
            return state.table
        run.table = state.table[run.first // self.store.block_size :]
        return run.table

    def first(self, slot: int) -> int:
        """Where the run of ``slot`` begins; 0 where there is none."""
        return self._run(slot).first

    def covered(self, slot: int) -> int:
        """Where the run of ``slot`` ends: all of these layers hold its positions; 0: no run."""
        return self._run(slot).end

    def skipped(self, slot: int) -> int:
        """Number of entries of the run's first block before the run."""
        return self._run(slot).first % self.store.block_size

    def next_start(self, slot: int, position: int, num_tokens: int) -> int:
        """The first position from ``position`` on whose entry is to be written next.

        It is ``position`` itself unless a gap would be left behind the run. For a gap of a few
        entries the last one of the run is repeated. Behind a larger one a new run begins, at the
        next border of a block where the text goes on well beyond it; entries before the new run are
        then not seen any more.

        Args:
            num_tokens: how many entries there are to write from ``position`` on.
        """
        run, size = self._run(slot), self.store.block_size
        end = min(run.ends, default=position)
        if run.first <= position <= end or self._repeat_last(slot, position):
            return position
        border = -(-position // size) * size
        # Filling only part of a block makes attention slower, and the block cannot be shared: worth
        # it only if there are few entries.
        return border if position + num_tokens >= border + size else position

    def begin(self, slot: int, start: int) -> None:
        """Entries are about to be written from ``start`` on: a new run, if there is a gap.

        Raises:
            KeyError: the slot is not allocated.
        """
        run = self._run(slot)
        run.go_on(start, min(run.ends, default=start))

    def reserve(self, slot: int, start: int, end: int) -> None:
        """Make room for the entries ``start`` to ``end`` in all layers, for a kernel that writes
        them itself.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: they lie before the slot's run.
            CacheFullError, MemoryError, RuntimeError: there is no memory left; nothing has changed
                then.
        """
        state, size = self._cache.slot(slot), self.store.block_size
        if start < self.first(slot):
            raise ValueError(f"entry {start} lies before those that slot {slot} holds")
        # Shared blocks that lack these entries are filled for all their users.
        index = start // size
        num_full = min(state.length // size, len(state.table))
        while start < end and index < num_full:
            if self.num_held(state.table[index]) > start - index * size:
                break
            index += 1
            start = min(end, index * size)
        if start < end:
            self._cache.own(slot, start, end)
        self.hold_blocks()

    def hold(self, slot: int, end: int) -> None:
        """Note that the entries before ``end`` were written in all layers in some other way."""
        run = self._run(slot)
        run.ends = [max(end, written) for written in run.ends]
        self._note(slot)

    def write(
        self, layer: int, slot: int, start: int, keys_HTD: Tensor, values_HTD: Tensor
    ) -> None:
        """Set the entries of positions ``start`` to ``start + T``; makes room for them.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: the layer does not exist, or the entries have another shape.
            CacheFullError, MemoryError, RuntimeError: as `reserve`.
        """
        self._check_layer(layer)
        expected = (self.shape.num_kv_heads, keys_HTD.shape[1], self.shape.head_dim)
        if not tuple(keys_HTD.shape) == tuple(values_HTD.shape) == expected:
            raise ValueError(
                f"keys {[*keys_HTD.shape]} and values {[*values_HTD.shape]} are not "
                f"[{expected[0]}, tokens, {expected[2]}]"
            )
        run, end = self._run(slot), start + keys_HTD.shape[1]
        run.go_on(start, run.ends[layer])
        self.reserve(slot, start, end)
        self.store.put(layer, self._cache.table(slot), start, keys_HTD, values_HTD)
        run.ends[layer] = max(run.ends[layer], end)
        self._note(slot)

    def read(self, layer: int, slot: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, T, D] of the run's positions before ``end``: copies.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: the layer does not exist, or not all of these positions were written.
        """
        self._check_layer(layer)
        run = self._run(slot)
        written = run.ends[layer]
        if not run.first <= end <= written:
            raise ValueError(f"{end} entries wanted; layer {layer} of slot {slot} holds {written}")
        skipped = self.skipped(slot)
        keys_HTD, values_HTD = self.store.get(layer, self.table(slot), end - run.first + skipped)
        return keys_HTD[:, skipped:], values_HTD[:, skipped:]

    # Calls of the cache when its slots and blocks change:

    def adopt(self, state: Slot) -> None:
        """A new slot begins with cached blocks: its run is the valid part at their end."""
        size, table = self.store.block_size, state.table
        last = next((p for p in reversed(range(len(table))) if self.num_held(table[p])), None)
        if last is None:
            return
        end, index = min(last * size + self.num_held(table[last]), state.length), last
        while index and self.num_held(table[index - 1]) == size:
            index -= 1
        state.runs[self] = EntryRun(index * size, [end] * self.shape.num_layers, end)

    def take_over(self, state: Slot, run: EntryRun) -> None:
        """A slot was forked: the new one copies the valid part of its run."""
        copy = state.runs[self] = EntryRun(run.first, list(run.ends), run.noted)
        copy.cut(state.length)

    def num_held(self, block: int) -> int:
        """Number of valid leading entries of a block."""
        return self._notes.get(block, 0)

    def cut_note(self, block: int, num_entries: int) -> None:
        """Entries of a block from there on belong to another text."""
        if self.num_held(block) > num_entries:
            self._notes[block] = num_entries

    def forget_notes(self, blocks: Sequence[int]) -> None:
        """The blocks get a new user: forget their valid lengths."""
        for block in blocks:
            self._notes.pop(block, None)

    def copy_block(self, source: int, target: int) -> None:
        """A slot that shared ``source`` is about to write ``target``."""
        if source < self.store.num_blocks:  # else these layers have nothing in it
            self.hold_blocks()
            self.store.copy(source, target)
            self._notes[target] = self.num_held(source)

    def release(self) -> None:
        """Free all memory: no slot is allocated, and no block is cached."""
        self._notes.clear()
        self.store.release()

    def _run(self, slot: int) -> EntryRun:
        state = self._cache.slot(slot)
        run = state.runs.get(self)
        if run is None:
            run = state.runs[self] = EntryRun(0, [0] * self.shape.num_layers)
        return run

    def _note(self, slot: int) -> None:
        run, state, size = self._run(slot), self._cache.slot(slot), self.store.block_size
        end = min(run.end, state.length)  # entries of guesses are not valid
        border = -(-run.first // size) * size
        if run.first < border and end >= border + size:
            run.first = border  # there are others enough by now
        for index in range(max(run.noted, border) // size, -(-end // size)):
            block, held = state.table[index], min(size, end - index * size)
            if held > self.num_held(block):
                self._notes[block] = held
        run.noted = max(run.noted, end)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.shape.num_layers:
            raise ValueError(f"layer {layer} does not exist; there are {self.shape.num_layers}")

    def _repeat_last(self, slot: int, end: int) -> bool:
        """Repeat the last entry of a run for the few missing ones before ``end``."""
        run, table = self._run(slot), self._cache.table(slot)
        start = run.end
        if not start or not 0 < end - start <= MOST_REPEATED:
            return False
        try:
            self.reserve(slot, start, end)
        except NO_MEMORY:
            return False
        self.store.move(table, [start - 1] * (end - start), start)
        run.ends = [end] * len(run.ends)
        return True

    def hold_blocks(self) -> None:
        """Take the memory of as many blocks as the cache has."""
        pool = self._cache.pool
        if pool.num_made > self.store.num_blocks:
            self.store.make_room(pool.num_made, pool.num_total)
