"""Slots of requests in the target's cache: given, shared and taken back."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.cache.base import NO_MEMORY
from foredraft.cache.prefix import PrefixCache
from foredraft.core.errors import CacheFullError
from foredraft.engine.request import Request
from foredraft.models.base import Target

HEADROOM = 64
"""Tokens of room for the reply, beyond its text, that the cache must have before a request begins.
With less the request would soon be preempted."""


class SlotManager:
    """Gives requests their slots, and takes them back.

    Args:
        target: whose cache it is.
        prefix_caching: keep the entries of ended requests for others with the same beginning.
    """

    def __init__(self, target: Target, prefix_caching: bool) -> None:
        self._cache = target.cache
        self._headroom = HEADROOM
        self.prefixes = PrefixCache(target.cache, prefix_caching)

    def open(self, request: Request) -> None:
        """Give a request a slot, with room for all of its text.

        Raises:
            CacheFullError: there is no room; nothing has changed.
        """
        try:
            request.slot, request.num_cached = self._open(request)
        except NO_MEMORY as error:
            raise as_cache_full(error) from error
        request.num_begun_with, request.num_named = request.num_cached, 0
        if not request.has_begun:
            request.num_reused = min(request.num_cached, request.num_prompt)
            request.has_begun = True

    def close(self, request: Request) -> None:
        """Free a request's slot. Its entries stay cached for requests with the same beginning."""
        if request.slot < 0:
            return
        slot, tokens = request.slot, request.tokens
        if request.has_read_nonsense:  # its shared beginning may be the cause
            self.prefixes.discard(slot, tokens, 0)
        elif request.finish_reason == "error":  # its own entries may be the cause
            self.prefixes.discard(slot, tokens, request.num_begun_with)
        else:
            self.prefixes.release(slot, tokens)
        request.slot, request.num_cached = -1, 0

    def note(self, requests: Sequence[Request]) -> None:
        """Publish the full blocks that these requests have prefilled, while they continue."""
        size = self._cache.block_size
        for request in requests:
            num_full = request.num_cached // size
            if num_full > request.num_named and request.slot >= 0:
                request.num_named = num_full
                self.prefixes.note(request.slot, request.tokens)

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
                and self.prefixes.num_found(tokens, salt) < border
            ):
                return True
        return False

    def _shares(self, request: Request) -> bool:
        return self.prefixes.enabled and request.options.prefix_caching

    def _open(self, request: Request) -> tuple[int, int]:
        leader = request.leader
        if leader is not None and self._holds_prompt(leader):
            slot, num_cached = self.prefixes.fork(leader.slot, request.num_prompt)
        elif request.options.prefix_caching:
            slot, num_cached = self.prefixes.open(request.tokens, request.salt)
            num_cached = self._usable(request, slot, num_cached)
        else:
            slot, num_cached = self._cache.allocate(), 0
        num_unread = len(request.tokens) - num_cached
        try:
            self._cache.reserve(slot, num_unread + min(self._headroom, request.num_remaining))
        except BaseException:
            self.prefixes.release(slot, request.tokens)
            raise
        return slot, num_cached

    def _holds_prompt(self, request: Request) -> bool:
        """Whether the cache has a request's prompt: an interrupted step may have left it behind."""
        return request.has_read_prompt and self._cache.length(request.slot) >= request.num_prompt

    def _usable(self, request: Request, slot: int, num_cached: int) -> int:
        """Usable part of a cached beginning: prompt log probabilities need prefill."""
        if request.prompt_logprobs is None:
            return num_cached
        num_cached = request.prompt_logprobs.num_usable(num_cached)
        self._cache.truncate(slot, num_cached)
        return num_cached


def as_cache_full(error: Exception) -> CacheFullError:
    """Any refusal of a cache as a `CacheFullError`: the engine may preempt others to make room."""
    return error if isinstance(error, CacheFullError) else CacheFullError(str(error))
