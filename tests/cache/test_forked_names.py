"""Slots that were forked name the same block twice, each as far as it goes."""

from __future__ import annotations

from foredraft.models.table import TokenCache

OWNER = b"somebody"


def forked(cache: TokenCache) -> tuple[int, int]:
    """A slot that holds 6, 2 and one that holds 6 of it, in the same block."""
    slot, _ = cache.share(OWNER, [])
    cache.write(slot, [6, 2])
    cache.keep(slot, 2, ())
    fork = cache.fork(slot)
    cache.truncate(fork, 1)
    return slot, fork


def test_a_block_is_named_again_when_more_of_it_is_left_behind() -> None:
    cache = TokenCache(block_size=2)
    slot, fork = forked(cache)
    cache.retire(fork, [6])
    cache.check()
    cache.retire(slot, [6, 2])
    cache.check()
    assert cache.share(OWNER, [6, 2, 5])[1] == 2
    cache.check()


def test_or_less_of_it() -> None:
    cache = TokenCache(block_size=2)
    slot, fork = forked(cache)
    cache.retire(slot, [6, 2])
    cache.retire(fork, [6])
    cache.check()
    assert cache.share(OWNER, [6, 2, 5])[1] == 2


def test_a_beginning_that_another_slot_keeps_is_forgotten_last() -> None:
    """The first slot's beginning lies in a block of its own; the fork goes on behind it."""
    cache = TokenCache(block_size=2, max_tokens=8)
    for rest in ([1, 1], [2, 2]):
        slot, _ = cache.share(OWNER, [])
        cache.write(slot, [7, 7, *rest])
        cache.keep(slot, 4, ())
        cache.retire(slot, [7, 7, *rest])
        cache.check()
    other = cache.allocate()
    cache.reserve(other, 4)  # takes what was used longest ago: an end
    assert cache.share(OWNER, [7, 7, 2, 2])[1] == 4
