"""Shapes, counts and checks that all caches share.

Shape legend: L layers, H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two texts."""
    for i, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return i
    return min(len(left), len(right))


def owner_of(salt: str | None) -> bytes:
    """The name that the first block of a text follows: other salts share nothing."""
    return hashlib.sha256(repr(salt).encode(errors="surrogatepass")).digest()
