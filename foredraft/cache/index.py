"""Prefix index: the texts of shareable blocks, as a tree of blocks named by chained hashes.

A block's name is the sha256 of the name before it and of its own tokens; the first name is that of
the text's owner. So equal names mean equal texts from the beginning on, and blocks of different
owners never meet. The last block of a text may be filled in part; it has no block behind it. Every
named block can be found: with a block go those behind it.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.cache.base import common_prefix


@dataclass(frozen=True)
class NamedBlock:
    """A block whose first entries are of these tokens, behind the text that ``before`` names."""

    before: bytes
    name: bytes
    tokens: tuple[int, ...]
    block: int


class PrefixIndex:
    """The blocks that have a name, with the unused ones in order of last use.

    The least recently used block is evicted first, and the end of a text before its beginning.

    Args:
        block_size: tokens of a full block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._named: dict[int, NamedBlock] = {}  # by block
        self._full: dict[bytes, NamedBlock] = {}  # by name
        self._behind: dict[bytes, list[NamedBlock]] = {}  # by the name before, in order of tokens
        self._unused: OrderedDict[int, None] = OrderedDict()  # blocks, the oldest first

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def __contains__(self, block: int) -> bool:
        return block in self._named

    @property
    def blocks(self) -> list[int]:
        """Blocks that have a name."""
        return list(self._named)

    @property
    def oldest(self) -> int:
        """The least recently used block without a user; there must be one."""
        return next(iter(self._unused))

    def is_unused(self, block: int) -> bool:
        """Whether it has a name and no user."""
        return block in self._unused

    def full(self, name: bytes) -> NamedBlock | None:
        """The full block of this name."""
        return self._full.get(name)

    def find(self, owner: bytes, tokens: Sequence[int]) -> tuple[list[NamedBlock], int]:
        """The blocks that hold the longest beginning of ``tokens``, and its length.

        The last of them may hold more than that.
        """
        found, size, before = list[NamedBlock](), self.block_size, owner
        for start in range(0, len(tokens), size):
            text = tuple(tokens[start : start + size])
            node = self._full.get(name_of(before, text)) if len(text) == size else None
            if node is None:
                nearest, count = self._nearest(before, text)
                return [*found, *([nearest] if nearest else [])], start + count
            found.append(node)
            before = node.name
        return found, len(tokens)

    def add(self, before: bytes, tokens: Sequence[int], block: int) -> NamedBlock:
        """Name a used block, unless another one already holds as much; returns the one to share.

        Args:
            before: an owner, or the name of a full block that can be found.
        """
        text = tuple(tokens)
        behind = self._behind.setdefault(before, [])
        index = bisect_left(behind, text, key=_text)
        if index < len(behind) and behind[index].tokens[: len(text)] == text:
            return behind[index]
        if block in self._named:  # by a slot that shared it and held less of it
            self.remove(block)
            return self.add(before, tokens, block)
        new = NamedBlock(before, name_of(before, text), text, block)
        behind.insert(index, new)
        self._enter(new)
        return new

    def exchange(self, node: NamedBlock, block: int) -> NamedBlock:
        """Move the name of a block to another used block with the same text."""
        behind = self._behind[node.before]
        new = NamedBlock(node.before, node.name, node.tokens, block)
        behind[bisect_left(behind, node.tokens, key=_text)] = new
        del self._named[node.block]
        self._unused.pop(node.block, None)
        self._enter(new)
        return new

    def shorter(self, than: NamedBlock) -> int | None:
        """An unused block whose tokens are only a prefix of those of ``than``, to be evicted."""
        behind = self._behind[than.before]
        index = bisect_left(behind, than.tokens, key=_text)
        other = behind[index - 1] if index else None
        if other is None or other.block not in self._unused:
            return None
        return other.block if than.tokens[: len(other.tokens)] == other.tokens else None

    def use(self, block: int) -> None:
        """A slot begins to use a block."""
        self._unused.pop(block, None)

    def leave(self, block: int) -> None:
        """No slot uses the block any more. The blocks before it count as used at the same time."""
        self._unused[block] = None
        self._unused.move_to_end(block)
        before = self._full.get(self._named[block].before)
        while before is not None and before.block in self._unused:
            self._unused.move_to_end(before.block)
            before = self._full.get(before.before)

    def touch(self, blocks: Sequence[int]) -> None:
        """Mark these blocks of one text, from its beginning on, as just used."""
        for block in reversed(blocks):
            if block in self._unused:
                self._unused.move_to_end(block)

    def remove(self, block: int) -> list[int]:
        """Remove the names of a block and of all behind it; returns the unused ones."""
        node = self._named[block]
        behind = self._behind[node.before]
        del behind[bisect_left(behind, node.tokens, key=_text)]
        if not behind:
            del self._behind[node.before]
        freed, gone = list[int](), [node]
        while gone:
            node = gone.pop()
            del self._named[node.block]
            if node.block in self._unused:
                del self._unused[node.block]
                freed.append(node.block)
            if self._full.pop(node.name, None) is not None:
                gone += self._behind.pop(node.name, [])
        return freed

    def check(self) -> None:
        """Whether the maps agree, and every block can be found.

        Raises:
            AssertionError: they do not.
        """
        listed = [node for behind in self._behind.values() for node in behind]
        assert sorted(node.block for node in listed) == sorted(self._named), "blocks unlisted"
        full = {n.name for n in listed if len(n.tokens) == self.block_size}
        assert full == set(self._full), "full blocks unlisted"
        assert set(self._unused) <= set(self._named), "unused blocks without a name"
        assert all(self._behind.values()), "a name that nothing is behind"

    def _enter(self, node: NamedBlock) -> None:
        self._named[node.block] = node
        if len(node.tokens) == self.block_size:
            self._full[node.name] = node

    def _nearest(self, before: bytes, text: tuple[int, ...]) -> tuple[NamedBlock | None, int]:
        """The block behind ``before`` with the longest common prefix with ``text``, and its
        length."""
        behind = self._behind.get(before, [])
        index = bisect_left(behind, text, key=_text)
        best, most = None, 0
        for other in behind[max(0, index - 1) : index + 1]:
            if (count := common_prefix(other.tokens, text)) > most:
                best, most = other, count
        return best, most


def name_of(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the block of ``tokens`` behind the one that is named ``before``."""
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()


def _text(node: NamedBlock) -> tuple[int, ...]:
    return node.tokens
