"""A request's place: its slot in the target's cache."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.cache.base import NO_MEMORY
from foredraft.cache.prefix import PrefixCache
from foredraft.core.errors import CacheFullError
from foredraft.engine.request import Request
from foredraft.models.base import Target

HEADROOM = 64
"""Tokens of its reply that there must be room for, beside its text, before a request begins: it
would soon have to give its place away again."""


class Places:
    """Gives requests their places, and takes them back.

    Args:
        target: whose cache it is.
        prefix_caching: keep what requests leave, for others that begin alike.
    """

    def __init__(self, target: Target, prefix_caching: bool) -> None:
        self._cache = target.cache
        self._headroom = HEADROOM
        self.prefixes = PrefixCache(target.cache, prefix_caching)

    def open(self, request: Request) -> None:
        """Give a request its place, with room for all of its text.

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
        """Take its place back. What it held may serve others that begin alike."""
        if request.slot < 0:
            return
        slot, tokens = request.slot, request.tokens
        if request.has_read_nonsense:  # and what it began with may be why
            self.prefixes.discard(slot, tokens, 0)
        elif request.finish_reason == "error":  # what it has read itself may be the cause
            self.prefixes.discard(slot, tokens, request.num_begun_with)
        else:
            self.prefixes.release(slot, tokens)
        request.slot, request.num_cached = -1, 0

    def note(self, requests: Sequence[Request]) -> None:
        """Let others find what these requests have read, block by block, while they go on."""
        size = self._cache.block_size
        for request in requests:
            num_full = request.num_cached // size
            if num_full > request.num_named and request.slot >= 0:
                request.num_named = num_full
                self.prefixes.note(request.slot, request.tokens)

    def must_wait(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a request is to wait for another that is just reading what it begins with.

        That is so while a request that came before it, of the same salt, is reading a block of
        text that the two have in common, and no block of it is cached that far. The other goes on
        with each step, or makes way, or is over: then the request begins.
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
        """What stays of a cached beginning: a prompt that is asked about must be read."""
        if request.prompt_logprobs is None:
            return num_cached
        num_cached = request.prompt_logprobs.num_usable(num_cached)
        self._cache.truncate(slot, num_cached)
        return num_cached


def as_cache_full(error: Exception) -> CacheFullError:
    """What any refusal of a cache is treated as: others may have to make room."""
    return error if isinstance(error, CacheFullError) else CacheFullError(str(error))
