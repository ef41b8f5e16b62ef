"""Slots of requests in the target's cache: given, shared, published, and taken back.

Only the target's cache decides what is shared: the cached length found does not depend on drafters.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence

from foredraft.cache.base import NO_MEMORY, Cache, owner_of
from foredraft.core.errors import CacheFullError
from foredraft.engine.request import Request

HEADROOM = 64
"""Tokens of room for the reply, beyond its text, that the cache must have before a request begins.
With less the request would soon be preempted."""
CHECK_VARIABLE = "FOREDRAFT_CHECK"
"""Environment variable: if set, the accounts of the cache are checked after each step."""
_CHECK_EVERY = 1000
"""Steps between two checks when the variable is not set."""

_log = logging.getLogger("foredraft")


class SlotManager:
    """Gives requests their slots, with the cached beginning of their text, and takes them back.

    Args:
        cache: the target's.
        enabled: prefix caching: entries of ended requests stay cached for texts with the same
            beginning. False: every text is prefilled in full.

    Attributes:
        num_tokens: of all texts that began.
        num_cached_tokens: tokens of them that did not have to be prefilled.
    """

    def __init__(self, cache: Cache, enabled: bool = True) -> None:
        self._cache, self.enabled = cache, enabled
        self._headroom = HEADROOM
        self._steps = itertools.count(1)
        self._check_every = 1 if os.environ.get(CHECK_VARIABLE) else _CHECK_EVERY
        self.num_tokens = self.num_cached_tokens = 0

    # ---- of requests -----------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Give a request a slot, with room for all of its text.

        Raises:
            CacheFullError: there is no room; nothing has changed.
        """
        try:
            request.slot, request.num_cached = self._begin(request)
        except NO_MEMORY as error:
            raise as_cache_full(error) from error
        request.num_begun_with, request.num_named = request.num_cached, 0
        if not request.has_begun:
            request.num_reused = min(request.num_cached, request.num_prompt)
            request.has_begun = True

    def end(self, request: Request) -> None:
        """Free a request's slot. Its entries stay cached for requests with the same beginning."""
        if request.slot < 0:
            return
        slot, tokens = request.slot, request.tokens
        if request.has_read_nonsense:  # its shared beginning may be the cause
            self.discard(slot, tokens, 0)
        elif request.finish_reason == "error":  # its own entries may be the cause
            self.discard(slot, tokens, request.num_begun_with)
        else:
            self.release(slot, tokens)
        request.slot, request.num_cached = -1, 0

    def publish(self, requests: Sequence[Request]) -> None:
        """Publish the full blocks that these requests have prefilled, while they continue."""
        size = self._cache.block_size
        for request in requests:
            num_full = request.num_cached // size
            if num_full > request.num_named and request.slot >= 0:
                request.num_named = num_full
                self.note(request.slot, request.tokens)

    def must_wait(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a request should wait for another that is prefilling the same beginning.

        True while an earlier running request with the same salt is still prefilling a block that
        both prompts share and that is not cached yet. This cannot block forever: the other request
        advances in every step, is preempted, or ends.
        """
        if request.has_begun or request.prompt_logprobs is not None or not self._shares(request):
            return False
        size, tokens, salt = self._cache.block_size, request.tokens, request.salt
        for other in running:
            border = (other.num_cached // size + 1) * size
            if (
                border < len(tokens)
                and other.order < request.order
                and other.salt == salt
                and self._shares(other)
                and not other.is_over
                and other.num_prompt >= border
                and other.tokens[:border] == tokens[:border]
                and self.num_found(tokens, salt) < border
            ):
                return True
        return False

    def _shares(self, request: Request) -> bool:
        return self.enabled and request.options.prefix_caching

    def _begin(self, request: Request) -> tuple[int, int]:
        leader = request.leader
        if leader is not None and self._holds_prompt(leader):
            slot, num_cached = self.fork(leader.slot, request.num_prompt)
        elif request.options.prefix_caching:
            slot, num_cached = self.open(request.tokens, request.salt)
            if request.prompt_logprobs is not None:  # they need prefill
                num_usable = request.prompt_logprobs.num_usable(num_cached)
                num_cached = self._cache.truncate(slot, num_usable)
        else:
            slot, num_cached = self._cache.allocate(), 0
        num_unread = len(request.tokens) - num_cached
        try:
            self._cache.reserve(slot, num_unread + min(self._headroom, request.num_remaining))
        except BaseException:
            self.release(slot, request.tokens)
            raise
        return slot, num_cached

    def _holds_prompt(self, request: Request) -> bool:
        """Whether the cache has a request's prompt: an interrupted step may have left it behind."""
        return request.has_read_prompt and self._cache.length(request.slot) >= request.num_prompt

    # ---- of texts --------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], salt: str | None = None) -> tuple[int, int]:
        """A slot for a text, and the number of its tokens that the slot already holds.

        At least one is left to read, so that something follows it.

        Args:
            salt: the owner of the text: texts under different salts are never shared.
        """
        if not self.enabled:
            return self._cache.allocate(), 0
        slot, num_found = self._cache.share(owner_of(salt), tokens)
        num_cached = self._cache.truncate(slot, max(0, min(num_found, len(tokens) - 1)))
        self._count(len(tokens), num_cached)
        return slot, num_cached

    def fork(self, slot: int, num_tokens: int) -> tuple[int, int]:
        """A slot for a text that begins as another one's first ``num_tokens``; as `open`."""
        copy = self._cache.fork(slot)
        num_cached = self._cache.truncate(copy, num_tokens - 1)
        self._count(num_tokens, num_cached)
        return copy, num_cached

    def num_found(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Number of tokens of a text that are cached now."""
        return self._cache.num_shared(owner_of(salt), tokens) if self.enabled else 0

    def note(self, slot: int, tokens: Sequence[int]) -> None:
        """Publish the full blocks of a slot whose text has been prefilled further."""
        if self.enabled:
            self._cache.name(slot, tokens)

    def release(self, slot: int, tokens: Sequence[int]) -> None:
        """Free a slot; its entries stay cached for sharing.

        Args:
            tokens: the text of its request.
        """
        if self.enabled:
            # Use the cache's length, not the request's: an interrupted step may leave them unequal.
            self._cache.retire(slot, tokens[: self._cache.length(slot)])
        else:
            self._cache.free(slot)

    def discard(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Free a slot; entries from ``start`` on may be bad and are not shared."""
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
        self.num_tokens += num_tokens
        self.num_cached_tokens += num_cached


def as_cache_full(error: Exception) -> CacheFullError:
    """Any refusal of a cache as a `CacheFullError`: the engine may preempt others to make room."""
    return error if isinstance(error, CacheFullError) else CacheFullError(str(error))
