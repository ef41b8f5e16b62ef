"""The interface between engine and KV cache. It speaks of slots and tokens, never of memory.

Shape legend: L layers, H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from foredraft.cache.layers import StoredLayers

NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Errors by which a cache reports that there is no room."""

_LISTED = 64
"""Bytes a token, for its place in lists, where no layer has entries: they are limited, too."""


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's entry.

    Attributes:
        wide: of the layers that have other heads than these; None: there are none.
        keys_are_values: an entry is a key, which is its value, too.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    wide: KVShape | None = None
    keys_are_values: bool = False

    def entry_size(self, dtype: torch.dtype) -> int:
        """Numbers of an entry of one head: int8 ones lie behind a float32, their scale."""
        in_front = torch.float32.itemsize if dtype == torch.int8 else 0
        return in_front + self.head_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        own = self.num_layers * self.num_kv_heads * self.entry_size(dtype) * dtype.itemsize
        own *= 1 if self.keys_are_values else 2
        own += self.wide.bytes_per_token(dtype) if self.wide else 0
        return own or _LISTED


@dataclass(frozen=True)
class CacheUsage:
    """Use of a cache's entries, in tokens; ``used + cached + free == total``.

    Attributes:
        total: entries that the memory limit allows.
        used: entries of slots, filled or reserved.
        cached: entries without a slot, kept because their text may come again; evicted when
            requests need them.
        free: neither used nor cached.
    """

    total: int
    used: int
    cached: int
    free: int

    @property
    def available(self) -> int:
        """Entries that requests can still get."""
        return self.free + self.cached


class Cache(Protocol):
    """A store of per-token state for several rows ("slots") of different lengths.

    A forward writes the entries of its pending tokens and tree nodes behind the valid ones, in that
    order; `keep` then makes some of them valid.
    """

    @property
    def block_size(self) -> int:
        """Entries of a block, which `name` lets others find once it is full."""

    rewinds: int
    """How many committed tokens `truncate` takes back without going further: 0, or what a drafter
    sets that commits its guesses."""

    def allocate(self) -> int:
        """A new empty slot, whose text is never shared."""

    def length(self, slot: int) -> int:
        """Number of valid entries of ``slot``."""

    def keep(self, slot: int, num_pending: int, path: Sequence[int]) -> None:
        """Commit the pending tokens and the tree nodes of ``path`` of the last forward.

        Entries of all other nodes are dropped.

        Raises:
            KeyError: the slot is not allocated.
            ValueError: ``num_pending`` and ``path`` do not match the written entries; nothing has
                changed then.
        """

    def truncate(self, slot: int, length: int) -> int:
        """Forget all entries from ``length`` on; returns how many are left.

        These may be fewer: a recurrent layer's state can only go back to where one was kept.
        """

    def fork(self, slot: int) -> int:
        """A new slot with the same entries; the two are independent afterwards."""

    def free(self, slot: int) -> None:
        """Give the slot back; its number may be handed out again."""

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` entries behind the valid ones.

        Raises:
            ValueError: a slot may not hold that many.
            CacheFullError: they do not fit into the cache's memory, even without all that is
                cached.
            MemoryError, RuntimeError: the system gives no more. Nothing has changed in any case.
        """

    def share(self, owner: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """A new slot with the longest beginning of a text that is cached, and its length.

        Args:
            owner: 32 bytes that name the text's owner. Text cached by other owners is not found.
                The slot and its forks keep the owner.
        """

    def num_shared(self, owner: bytes, tokens: Sequence[int]) -> int:
        """Number of tokens that `share` would find now."""

    def name(self, slot: int, tokens: Sequence[int]) -> None:
        """Publish the slot's full blocks for sharing, while the slot stays in use.

        Blocks of a slot without an owner (see `allocate`) are not published.

        Args:
            tokens: the slot's text, at least that of the valid entries.
        """

    def retire(self, slot: int, tokens: Sequence[int]) -> None:
        """Free the slot, but keep its first entries cached until their memory is needed.

        Args:
            tokens: the text of the entries to keep, at most the valid ones.
        """

    def distrust(self, slot: int, tokens: Sequence[int], start: int = 0) -> None:
        """The slot's entries from ``start`` on may be bad.

        They, their copies and entries computed from them are never found again.

        Args:
            tokens: the slot's text.
        """

    def forget(self) -> None:
        """Evict all cached entries."""

    @property
    def usage(self) -> CacheUsage:
        """Use of the cache's memory."""

    def check(self) -> None:
        """Check the accounts: every block is free, cached, or used by exactly the slots that list
        it.

        Raises:
            AssertionError: they are not. This is a bug of foredraft.
        """

    def add_layers(self, shape: KVShape, dtype: torch.dtype) -> StoredLayers:
        """Further layers of this shape; see `Capabilities.cache_layers`.

        A step may be under way in another thread; two callers at once must take turns.
        """


def check_keep(num_pending: int, path: Sequence[int], num_written: int) -> None:
    """Refuse to commit entries that the last forward did not write.

    Args:
        num_pending: see `Cache.keep`.
        path: see `Cache.keep`: nodes of a tree, whose numbers rise from a parent to its child.
        num_written: entries behind the valid ones.

    Raises:
        ValueError: see `Cache.keep`.
    """
    if not 0 <= num_pending <= num_written:
        raise ValueError(f"cannot keep {num_pending} pending tokens of {num_written} written")
    if any(a >= b for a, b in itertools.pairwise([-1, *path])):
        raise ValueError(f"path {[*path]} is none: node numbers rise from 0 on")
    num_nodes = num_written - num_pending
    if path and path[-1] >= num_nodes:
        raise ValueError(f"path {[*path]} leads out of a tree of {num_nodes} nodes")


def owner_of(salt: str | None) -> bytes:
    """The name that the first block of a text follows: other salts share nothing."""
    return hashlib.sha256(repr(salt).encode(errors="surrogatepass")).digest()
