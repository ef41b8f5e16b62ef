"""Who has which block. Numbers only: what is in a block, and where it lies, others know.

A block is *free*, *used* by one slot or several, or *cached*: used by nobody, and kept because its
text may come again. It is written only where one slot alone uses it and it has no name; else the
slot writes into a copy of its own.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from foredraft.cache.base import CacheUsage
from foredraft.cache.index import PrefixIndex
from foredraft.core.errors import CacheFullError

BLOCK = 64
"""Entries of a block. The fused kernel reads runs of 32, of which a block holds a multiple."""


def in_blocks(num_tokens: int) -> int:
    """Entries that are taken for ``num_tokens``."""
    return -(-num_tokens // BLOCK) * BLOCK


class BlockPool:
    """Hands out blocks, the cached ones when no free one is left.

    Args:
        limit: how many there may be; asked each time, for it falls when entries get larger.
        index: the blocks with a name.
    """

    def __init__(self, limit: Callable[[], int], index: PrefixIndex) -> None:
        self._limit, self._index = limit, index
        self._users: Counter[int] = Counter()  # slots, by used block
        self._returned: list[int] = []  # a heap: low numbers first keep memory compact
        self.num_made = 0

    @property
    def num_total(self) -> int:
        """At least what is used: a limit that has fallen takes nothing away from anyone."""
        return max(self._limit(), self.num_used + self._index.num_unused)

    @property
    def num_used(self) -> int:
        return len(self._users)

    @property
    def is_idle(self) -> bool:
        """Whether all blocks are free."""
        return not self._users and not self._index.num_unused

    def take(self, count: int) -> list[int]:
        """Blocks for one slot, whose contents are anything.

        Raises:
            CacheFullError: there are not so many; nothing has changed then.
        """
        limit = self._limit()
        if self.num_used + count > limit:
            size = self._index.block_size
            otherwise = "wait until requests end, send fewer at once, or " if count <= limit else ""
            raise CacheFullError(
                f"the cache has no room for {count * size} more tokens: {self.num_used * size} of "
                f"the {limit * size} that its memory allows are in use; {otherwise}let it have "
                "more (cache_memory)"
            )
        while self.num_used + count + self._index.num_unused > limit:
            heapq.heappush(self._returned, self._index.forget())
        taken = []
        for _ in range(count):
            if self._returned:
                taken.append(heapq.heappop(self._returned))
            else:
                taken.append(self.num_made)
                self.num_made += 1
        self._users.update(taken)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more slot uses them."""
        for block in blocks:
            self._index.use(block)
            self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """A slot uses them no longer. Of one text, in its order: its end is forgotten first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._index:
                self._index.leave(block)
            else:
                heapq.heappush(self._returned, block)

    def num_users(self, block: int) -> int:
        return self._users[block]

    def is_shared(self, block: int) -> bool:
        """Whether others than its one user may read it."""
        return self._users[block] > 1 or block in self._index

    def forget(self, block: int | None = None) -> None:
        """Free a cached block; by default the least recently used one."""
        heapq.heappush(self._returned, self._index.forget(block))

    def start_over(self) -> None:
        """Number blocks from 0 again; all must be free."""
        self._returned.clear()
        self.num_made = 0

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Whether every block has one state, and is used by just the slots that list it.

        Raises:
            AssertionError: one does not.
        """
        listed = Counter(block for table in tables for block in table)
        assert listed == self._users, f"used by {dict(self._users)}, listed by {dict(listed)}"
        cached = {block for block in range(self.num_made) if self._index.is_unused(block)}
        assert len(cached) == self._index.num_unused, "cached blocks that were never made"
        assert cached.isdisjoint(listed), f"blocks {cached & set(listed)} are used and cached"
        states = [*listed, *cached, *self._returned]
        assert sorted(states) == [*range(self.num_made)], "free, used and cached are not all blocks"
        self._index.check()


class BlockTables:
    """The blocks of each slot, in the order of its entries.

    Args:
        limit: see `BlockPool`.
        block_size: entries of a block.
        prepare: told of blocks before a slot gets them: makes room for their entries.
        copy: copies the entries of one block into another.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        block_size: int,
        prepare: Callable[[Sequence[int]], None],
        copy: Callable[[int, int], None],
    ) -> None:
        self.block_size = block_size
        self._index = PrefixIndex(block_size)
        self.pool = BlockPool(limit, self._index)
        self._prepare, self._copy = prepare, copy
        self._tables: dict[int, array[int]] = {}

    def __getitem__(self, slot: int) -> array[int]:
        """The slot's blocks, as C integers. Do not change it, nor hold it while slots change."""
        return self._tables[slot]

    def __len__(self) -> int:
        return len(self._tables)

    def open(self, slot: int) -> None:
        self._tables[slot] = array("i")

    def num_entries(self, slot: int) -> int:
        """How many its blocks hold."""
        return len(self._tables[slot]) * self.block_size

    def own(self, slot: int, start: int, end: int) -> None:
        """Let the slot write the entries ``start`` to ``end``: into blocks that it alone uses.

        Raises:
            CacheFullError: there are no blocks left.
            MemoryError, RuntimeError: there is no memory for them. Nothing has changed then.
        """
        table, size = self._tables[slot], self.block_size
        num_blocks = -(-end // size)
        held = range(min(start // size, len(table)), min(num_blocks, len(table)))
        shared = [place for place in held if self.pool.is_shared(table[place])]
        num_new = max(0, num_blocks - len(table))
        if not shared and not num_new:
            return
        try:
            blocks = self._new_blocks([table[place] for place in shared], num_new)
        except CacheFullError:
            mine = [place for place in shared if self.pool.num_users(table[place]) == 1]
            if not mine:
                raise
            # Nobody else reads these: they are kept for others only, who must do without them.
            shared = [place for place in shared if place not in mine]
            blocks = self._new_blocks([table[place] for place in shared], num_new)
            for place in mine:
                self._index.remove(table[place])
        for place, block in zip(shared, blocks, strict=False):
            self.pool.give_back([table[place]])
            table[place] = block
        table.extend(blocks[len(shared) :])

    def cut(self, slot: int, end: int) -> None:
        """Give back the blocks that hold no entry before ``end``."""
        table, first = self._tables[slot], -(-end // self.block_size)
        self.pool.give_back(table[first:])
        del table[first:]

    def share(self, slot: int, other: int, end: int) -> None:
        """Let the empty slot ``other`` hold what ``slot`` holds before ``end``."""
        self._adopt(other, self._tables[slot][: -(-end // self.block_size)])

    def close(self, slot: int) -> None:
        self.pool.give_back(self._tables.pop(slot))

    def find(self, slot: int, owner: bytes, tokens: Sequence[int]) -> int:
        """Let the empty slot hold the longest beginning of ``tokens`` there is; its length."""
        blocks, length = self._index.find(owner, tokens)
        self._adopt(slot, blocks)
        return length

    def name(self, slot: int, owner: bytes, tokens: Sequence[int]) -> list[int]:
        """Let others share the slot's blocks as far as they hold ``tokens``, its first entries.

        Returns the blocks that hold them from now on, to be touched when the slot is closed.
        """
        table, size, before, named = self._tables[slot], self.block_size, owner, list[int]()
        for place in range(-(-len(tokens) // size)):
            text = tokens[place * size : (place + 1) * size]
            node = self._index.add(before, text, table[place])
            while (shorter := self._index.shorter(node)) is not None:
                self.pool.forget(shorter)
            before = node.name
            named.append(node.block)
        return named

    def unname(self, slot: int) -> None:
        """Let nobody find the slot's blocks any more."""
        for block in self._tables[slot]:
            if block in self._index:
                self._index.remove(block)

    def touch(self, blocks: Sequence[int]) -> None:
        """These blocks of one text were wanted just now; see `PrefixIndex.touch`."""
        self._index.touch(blocks)

    def forget(self) -> None:
        """Free all cached blocks."""
        while self._index.num_unused:
            self.pool.forget()

    def usage(self) -> CacheUsage:
        total, used = self.pool.num_total, self.pool.num_used
        counts = (total, used, self._index.num_unused, total - used - self._index.num_unused)
        return CacheUsage(*(count * self.block_size for count in counts))

    def check(self) -> None:
        """See `BlockPool.check`."""
        self.pool.check([*self._tables.values()])

    def _adopt(self, slot: int, blocks: Sequence[int]) -> None:
        self.pool.share(blocks)
        self._tables[slot].extend(blocks)

    def _new_blocks(self, to_copy: Sequence[int], num_empty: int) -> list[int]:
        """Copies of some blocks, then empty ones."""
        blocks = self.pool.take(len(to_copy) + num_empty)
        try:
            self._prepare(blocks)
            for source, target in zip(to_copy, blocks, strict=False):
                self._copy(source, target)
        except BaseException:
            self.pool.give_back(blocks)
            raise
        return blocks
