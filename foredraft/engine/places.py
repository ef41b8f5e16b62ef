"""A row's place: its slot in the cache, and the drafter's attention."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.cache.base import NO_MEMORY
from foredraft.cache.prefix import PrefixCache
from foredraft.core.errors import CacheFullError
from foredraft.drafters.base import DraftRequest
from foredraft.engine.guard import GuardedDrafter
from foredraft.engine.row import Row
from foredraft.models.base import Target

HEADROOM = 64
"""Tokens of its reply that there must be room for, beside its text, before a row begins: it would
soon have to give its place away again."""


class Places:
    """Gives rows their places, and takes them back.

    Args:
        target: whose cache it is.
        drafter: hears of rows that come and go.
        prefix_caching: keep what they leave, for others that begin alike.
    """

    def __init__(self, target: Target, drafter: GuardedDrafter, prefix_caching: bool) -> None:
        self._cache, self._drafter = target.cache, drafter
        self._headroom = HEADROOM
        self.prefixes = PrefixCache(target.cache, prefix_caching)

    def open(self, row: Row) -> None:
        """Give a row its place, with room for all of its text, and tell the drafter.

        Raises:
            CacheFullError: there is no room; nothing has changed.
        """
        request = row.request
        try:
            slot, num_cached = self._open(row)
        except NO_MEMORY as error:
            raise as_cache_full(error) from error
        request.slot, request.num_cached = slot, num_cached
        row.num_begun_with, row.num_named = num_cached, 0
        if not row.has_begun:
            row.num_reused, row.has_begun = num_cached, True
        if row.is_followed:
            self._drafter.begin(
                DraftRequest(
                    row.request_id,
                    tuple(request.tokens),
                    request.params,
                    row.tenant,
                    num_cached,
                    slot,
                )
            )

    def close(self, row: Row) -> None:
        """Take its place back. What it held may serve others that begin alike."""
        request = row.request
        row.is_followed = self._drafter.is_live(row.request_id)
        self._drafter.end(row.request_id)
        if request.slot < 0:
            return
        slot, tokens = request.slot, request.tokens
        if row.has_read_nonsense:  # and what it began with may be why
            self.prefixes.discard(slot, tokens, 0)
        elif request.finish_reason == "error":  # what it has read itself may be the cause
            self.prefixes.discard(slot, tokens, row.num_begun_with)
        else:
            self.prefixes.release(slot, tokens)
        request.slot, request.num_cached = -1, 0

    def note(self, rows: Sequence[Row]) -> None:
        """Let others find what these rows have read, block by block, while they go on."""
        size = self._cache.block_size
        for row in rows:
            request = row.request
            if request.num_cached // size > row.num_named and request.slot >= 0:
                row.num_named = request.num_cached // size
                self.prefixes.note(request.slot, request.tokens)

    def must_wait(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether a row is to wait for another that is just reading what it begins with.

        That is so while a row that came before it, of the same tenant, is reading a block of text
        that the two have in common, and no block of it is cached that far. The other goes on with
        each step, or makes way, or is over: then the row begins.
        """
        if row.has_begun or row.prompt_logprobs is not None or not self.prefixes.enabled:
            return False
        size, tokens = self._cache.block_size, row.request.tokens
        for other in running:
            read = other.request
            border = (read.num_cached // size + 1) * size
            if (
                border < len(tokens)
                and other.order < row.order
                and other.tenant == row.tenant
                and not read.finish_reason
                and read.num_prompt >= border
                and read.tokens[:border] == tokens[:border]
                and self.prefixes.num_found(tokens, row.tenant) < border
            ):
                return True
        return False

    def _open(self, row: Row) -> tuple[int, int]:
        request = row.request
        if row.leader is not None and row.leader.has_read_prompt:
            slot, num_cached = self.prefixes.fork(row.leader.request.slot, request.num_prompt)
        else:
            slot, num_cached = self.prefixes.open(request.tokens, row.tenant)
            num_cached = self._unread(row, slot, num_cached)
        wanted = len(request.tokens) - num_cached + min(self._headroom, request.num_remaining)
        try:
            self._cache.reserve(slot, wanted)
        except BaseException:
            self.prefixes.release(slot, request.tokens)
            raise
        return slot, num_cached

    def _unread(self, row: Row, slot: int, num_cached: int) -> int:
        """What stays of a cached beginning: a prompt that is asked about must be read."""
        if row.prompt_logprobs is None:
            return num_cached
        num_cached = row.prompt_logprobs.num_usable(num_cached)
        self._cache.truncate(slot, num_cached)
        return num_cached


def as_cache_full(error: Exception) -> CacheFullError:
    """What any refusal of a cache is treated as: others may have to make room."""
    return error if isinstance(error, CacheFullError) else CacheFullError(str(error))
