"""Slots of requests in the target's cache: given, shared, published, and taken back.

Only the target's cache decides what is shared: the cached length found does not depend on drafters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from foredraft.cache.base import NO_MEMORY, owner_of
from foredraft.cache.paged import Cache
from foredraft.core.errors import CacheFullError
from foredraft.engine.request import Request

HEADROOM = 64
"""Tokens of room for the reply, beyond its text, that the cache must have before a request begins.
With less the request would soon be preempted."""

_log = logging.getLogger("foredraft")


def begin(cache: Cache, request: Request, headroom: int = HEADROOM) -> None:
    """Give a request a slot, with the cached beginning of its text and room for all of it.

    Raises:
        CacheFullError: there is no room; nothing has changed.
    """
    try:
        request.slot, request.num_cached = _new_slot(cache, request, headroom)
    except NO_MEMORY as error:
        raise as_cache_full(error) from error
    request.num_published = 0
    if not request.has_begun:
        request.num_reused = min(request.num_cached, request.num_prompt)
        request.has_begun = True


def end(cache: Cache, request: Request) -> None:
    """Free a request's slot. Its entries stay cached for requests with the same beginning."""
    if request.slot < 0:
        return
    if request.casts_doubt:
        cache.distrust()
    release(cache, request.slot, request.tokens)
    request.slot, request.num_cached = -1, 0


def publish(cache: Cache, requests: Sequence[Request]) -> None:
    """Publish the full blocks that these requests have prefilled, while they continue."""
    for request in requests:
        num_full = request.num_cached // cache.block_size
        if num_full > request.num_published and request.slot >= 0:
            request.num_published = num_full
            cache.publish(request.slot, request.tokens)


def must_wait(cache: Cache, request: Request, running: Sequence[Request]) -> bool:
    """Whether a request should wait for another that is prefilling the same beginning.

    True while an earlier running request with the same salt is still prefilling a block that both
    prompts share and that is not cached yet. This cannot block forever: the other request advances
    in every step, is preempted, or ends.
    """
    if request.has_begun or request.prompt_logprobs is not None or not request.shares:
        return False
    size, tokens, salt = cache.block_size, request.tokens, request.salt
    for other in running:
        border = (other.num_cached // size + 1) * size
        if (
            border < len(tokens)
            and other.order < request.order
            and other.salt == salt
            and other.shares
            and not other.is_over
            and other.num_prompt >= border
            and other.tokens[:border] == tokens[:border]
            and cache.num_shared(owner_of(salt), tokens) < border
        ):
            return True
    return False


def open_slot(cache: Cache, tokens: Sequence[int], salt: str | None = None) -> tuple[int, int]:
    """A slot for a text, and the number of its tokens that the slot already holds.

    At least one is left to read, so that something follows it.

    Args:
        salt: the owner of the text: texts under different salts are never shared.
    """
    slot, num_found = cache.share(owner_of(salt), tokens)
    return slot, cache.truncate(slot, max(0, min(num_found, len(tokens) - 1)))


def release(cache: Cache, slot: int, tokens: Sequence[int]) -> None:
    """Free a slot; its entries stay cached for sharing if it has an owner.

    Args:
        tokens: the text of its request.
    """
    # Use the cache's length, not the request's: an interrupted step may leave them unequal.
    cache.retire(slot, tokens[: cache.length(slot)])


def check(cache: Cache, must_be_right: bool) -> None:
    """Check the cache's accounts; see `foredraft.cache.paged.Cache.check`.

    Raises:
        AssertionError: they are wrong, and ``must_be_right``. Otherwise the log says so.
    """
    try:
        cache.check()
    except AssertionError as error:
        if must_be_right:
            raise
        _log.error("the cache's accounts are wrong, please report it: %s", error)


def as_cache_full(error: Exception) -> CacheFullError:
    """Any refusal of a cache as a `CacheFullError`: the engine may preempt others to make room."""
    return error if isinstance(error, CacheFullError) else CacheFullError(str(error))


def _new_slot(cache: Cache, request: Request, headroom: int) -> tuple[int, int]:
    leader = request.leader
    if leader is not None and _holds_prompt(cache, leader):
        slot = cache.fork(leader.slot)
        num_cached = cache.truncate(slot, request.num_prompt - 1)
    elif request.shares:
        slot, num_cached = open_slot(cache, request.tokens, request.salt)
        if request.prompt_logprobs is not None:  # they need prefill
            num_cached = cache.truncate(slot, request.prompt_logprobs.num_usable(num_cached))
    else:
        slot, num_cached = cache.allocate(), 0
    num_unread = len(request.tokens) - num_cached
    try:
        cache.reserve(slot, num_unread + min(headroom, request.num_remaining))
    except BaseException:
        release(cache, slot, request.tokens)
        raise
    return slot, num_cached


def _holds_prompt(cache: Cache, request: Request) -> bool:
    """Whether the cache has a request's prompt: an interrupted step may have left it behind."""
    return request.has_read_prompt and cache.length(request.slot) >= request.num_prompt
