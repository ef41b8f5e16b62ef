"""Block allocation: which slots use which block. It knows block numbers, not contents or memory.

A block is *free*, *used* by one slot or several, or *cached*: used by no slot, and kept because its
text may come again. A slot writes only into blocks that it alone uses and that have no name; others
are copied first (copy-on-write).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from foredraft.cache.base import CacheUsage
from foredraft.cache.index import NamedBlock, PrefixIndex
from foredraft.core.errors import CacheFullError

BLOCK = 64
"""Entries of a block. The fused kernel reads runs of 32, of which a block holds a multiple."""


def in_blocks(num_tokens: int) -> int:
    """Entries of the blocks that hold ``num_tokens``."""
    return -(-num_tokens // BLOCK) * BLOCK


class BlockPool:
    """Hands out blocks, the cached ones when no free one is left.

    Args:
        limit: returns the most blocks; called each time, because it falls when entries get larger.
        block_size: entries of a block.
    """

    def __init__(self, limit: Callable[[], int], block_size: int) -> None:
        self._limit = limit
        self.index = PrefixIndex(block_size)
        self._users: Counter[int] = Counter()  # slots, by used block
        self._returned: list[int] = []  # a heap: low numbers first keep memory compact
        self.num_made = 0

    @property
    def num_total(self) -> int:
        """Never less than the used blocks: a lower limit takes no block away from a slot."""
        return max(self._limit(), self.num_used + self.index.num_unused)

    @property
    def num_used(self) -> int:
        return len(self._users)

    @property
    def is_idle(self) -> bool:
        """Whether all blocks are free."""
        return not self._users and not self.index.num_unused

    @property
    def usage(self) -> CacheUsage:
        """Reads counters only, so any thread may call it."""
        used, cached = self.num_used, self.index.num_unused
        total = max(self._limit(), used + cached)
        size = self.index.block_size
        return CacheUsage(total * size, used * size, cached * size, (total - used - cached) * size)

    def take(self, count: int) -> list[int]:
        """Blocks for one slot, with arbitrary contents.

        Raises:
            CacheFullError: there are too few; nothing has changed then.
        """
        limit = self._limit()
        if self.num_used + count > limit:
            size = self.index.block_size
            otherwise = "wait until requests end, send fewer at once, or " if count <= limit else ""
            raise CacheFullError(
                f"the cache has no room for {count * size} more tokens: {self.num_used * size} of "
                f"the {limit * size} that its memory allows are in use; {otherwise}let it have "
                "more (cache_memory)"
            )
        while self.num_used + count + self.index.num_unused > limit:
            self.unpublish(self.index.oldest)
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
            self.index.use(block)
            self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Release a slot's blocks of one text, in its order; the end is evicted first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self.index:
                self.index.leave(block)
            else:
                heapq.heappush(self._returned, block)

    def num_users(self, block: int) -> int:
        return self._users[block]

    def is_shared(self, block: int) -> bool:
        """Whether the block is shared or may be found by others."""
        return self._users[block] > 1 or block in self.index

    def unpublish(self, block: int) -> None:
        """Unpublish a block and all blocks behind it."""
        for freed in self.index.remove(block):
            heapq.heappush(self._returned, freed)

    def publish(self, before: bytes, tokens: Sequence[int], block: int) -> NamedBlock:
        """Publish a used block; returns the block that others find. See `PrefixIndex.add`."""
        node = self.index.add(before, tokens, block)
        while (shorter := self.index.shorter(node)) is not None:
            self.unpublish(shorter)
        return node

    def exchange(self, node: NamedBlock, block: int) -> NamedBlock:
        """Let others find ``block``, which a slot uses, in place of another of the same text."""
        was_unused = self.index.is_unused(node.block)
        new = self.index.exchange(node, block)
        if was_unused:
            heapq.heappush(self._returned, node.block)
        return new

    def forget(self) -> None:
        """Free all cached blocks."""
        while self.index.num_unused:
            self.unpublish(self.index.oldest)

    def distrust(self) -> None:
        """Unpublish all blocks."""
        for block in self.index.blocks:
            if block in self.index:  # not gone along with one before it
                self.unpublish(block)

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
        cached = {block for block in range(self.num_made) if self.index.is_unused(block)}
        assert len(cached) == self.index.num_unused, "cached blocks that were never made"
        assert cached.isdisjoint(listed), f"blocks {cached & set(listed)} are used and cached"
        states = [*listed, *cached, *self._returned]
        assert sorted(states) == [*range(self.num_made)], "free, used and cached are not all blocks"
        self.index.check()
