"""Prefix caching: a request with a cached beginning prefills only the rest."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.cache.base import Cache, owner_of

CHECK_VARIABLE = "FOREDRAFT_CHECK"
"""Environment variable: if set, the accounts of the cache are checked after each step."""
_CHECK_EVERY = 1000
"""Steps between two checks when the variable is not set."""

_log = logging.getLogger("foredraft")


@dataclass
class PrefixStats:
    """Counts of prefix caching.

    Attributes:
        requests: opened.
        hits: requests that began with cached tokens.
        tokens: of all prompts.
        cached_tokens: tokens that did not have to be prefilled.
    """

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    cached_tokens: int = 0


class PrefixCache:
    """Hands out slots with the cached beginning of a text, and publishes prefilled blocks.

    Only the target's cache decides: the cached length found does not depend on drafters.

    Args:
        cache: the target's.
        enabled: False: no entries are kept, and every text is prefilled in full.
    """

    def __init__(self, cache: Cache, enabled: bool = True) -> None:
        self._cache, self.enabled = cache, enabled
        self._steps = itertools.count(1)
        self._check_every = 1 if os.environ.get(CHECK_VARIABLE) else _CHECK_EVERY
        self.stats = PrefixStats()

    def open(self, tokens: Sequence[int], salt: str | None = None) -> tuple[int, int]:
        """A slot for a request, and the number of its tokens that the slot already holds.

        At least one is left to read, so that something follows it.

        Args:
            salt: the owner of the text: texts under different salts are never shared.
        """
        if not self.enabled:
            return self._cache.allocate(), 0
        slot, num_found = self._cache.share(owner_of(salt), tokens)
        num_cached = max(0, min(num_found, len(tokens) - 1))
        self._cache.truncate(slot, num_cached)
        self._count(len(tokens), num_cached)
        return slot, num_cached

    def fork(self, slot: int, num_tokens: int) -> tuple[int, int]:
        """A slot for a request that begins as another one's first ``num_tokens``; as `open`."""
        copy = self._cache.fork(slot)
        self._cache.truncate(copy, num_tokens - 1)
        self._count(num_tokens, num_tokens - 1)
        return copy, num_tokens - 1

    def num_found(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Number of tokens of a text that are cached now."""
        return self._cache.num_shared(owner_of(salt), tokens) if self.enabled else 0

    def note(self, slot: int, tokens: Sequence[int]) -> None:
        """Publish the full blocks of a request that has prefilled more of its text."""
        if self.enabled:
            self._cache.name(slot, tokens)

    def release(self, slot: int, tokens: Sequence[int]) -> None:
        """Free the slot of a finished or preempted request; its entries stay cached for sharing.

        Args:
            tokens: the request's.
        """
        if self.enabled:
            # Use the cache's length, not the request's: an interrupted step may leave them unequal.
            self._cache.retire(slot, tokens[: self._cache.length(slot)])
        else:
            self._cache.free(slot)

    def discard(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Free the slot of a request; entries from ``start`` on may be bad and are not shared."""
        if self.enabled:
            self._cache.distrust(slot, tokens, start)
        self._cache.free(slot)

    def clear(self) -> None:
        """Evict all cached entries."""
        self._cache.forget()

    def check_now_and_then(self) -> None:
        """To be called after each step; see `foredraft.cache.base.Cache.check`.

        Raises:
            AssertionError: the accounts are wrong, and ``FOREDRAFT_CHECK`` is set.
        """
        if next(self._steps) % self._check_every:
            return
        try:
            self._cache.check()
        except AssertionError as error:
            if self._check_every == 1:
                raise
            _log.error("the cache's accounts are wrong, please report it: %s", error)

    def _count(self, num_tokens: int, num_cached: int) -> None:
        self.stats.requests += 1
        self.stats.hits += num_cached > 0
        self.stats.tokens += num_tokens
        self.stats.cached_tokens += num_cached
