"""Prefix caching: a request that begins as an earlier one did reads only what is new."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.cache.base import Cache, CacheLayers
from foredraft.core.errors import ConfigError

CHECK_VARIABLE = "FOREDRAFT_CHECK"
"""Set in the environment: the accounts of the cache are checked after each step."""
_CHECK_EVERY = 1000
"""Steps between two checks elsewhere."""

_log = logging.getLogger("foredraft")


@dataclass(eq=False)
class Session:
    """A conversation: one reply at a time. What its turns share is found by `PrefixCache`.

    Attributes:
        busy: whether a request is using it.
    """

    busy: bool = False

    def close(self) -> None:
        """It holds nothing of its own.

        Raises:
            ConfigError: a reply is under way.
        """
        if self.busy:
            raise ConfigError("a reply of this conversation is under way; cancel it first")


@dataclass
class PrefixStats:
    """What prefix caching found.

    Attributes:
        requests: opened.
        hits: of them, those that began with something cached.
        tokens: of all prompts.
        cached_tokens: of them, those that did not have to be read.
    """

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    cached_tokens: int = 0


class PrefixCache:
    """Hands out slots with what is cached of a text, and keeps what requests leave behind.

    Args:
        cache: the target's. Several engines on it find each other's texts.
        layers: of the drafter: what they lack of a text is read again. They are of this one alone,
            so what it keeps is found by no other, and it finds nothing of others.
        look_ahead: how many tokens behind its own an entry of these layers depends on: so many
            fewer are shared.
        enabled: False keeps nothing, and reads all of each text.
    """

    def __init__(
        self,
        cache: Cache,
        layers: Sequence[CacheLayers] = (),
        look_ahead: int = 0,
        enabled: bool = True,
    ) -> None:
        self._cache, self._layers, self._look_ahead = cache, tuple(layers), look_ahead
        self._enabled = enabled
        self._identity = secrets.token_hex(16) if layers else None
        self._owners: dict[int, bytes] = {}  # by slot in use
        self._steps = itertools.count(1)
        self._check_every = 1 if os.environ.get(CHECK_VARIABLE) else _CHECK_EVERY
        self.stats = PrefixStats()

    @property
    def num_tokens(self) -> int:
        """Entries in use."""
        return self._cache.usage.used

    @property
    def num_free_tokens(self) -> int:
        """Entries that requests can still get: free ones, and those kept only for later."""
        return self._cache.usage.available

    def open(self, tokens: Sequence[int], salt: str | None = None) -> tuple[int, int]:
        """A slot for a request, and how many of its tokens the slot holds already.

        At least one is left to read, so that something follows it.

        Args:
            salt: whose text it is: texts under different salts are never shared.
        """
        if not self._enabled:
            return self._cache.allocate(), 0
        owner = _owner(self._identity, salt)
        slot, num_found = self._cache.share(owner, tokens)
        num_cached = max(0, min(num_found - self._look_ahead, len(tokens) - 1))
        self._cache.truncate(slot, num_cached)
        for layers in self._layers:  # nothing is kept that they do not hold
            layers.hold(slot, num_cached)
        self._owners[slot] = owner
        self._count(len(tokens), num_cached)
        return slot, num_cached

    def fork(self, slot: int, num_tokens: int) -> tuple[int, int]:
        """A slot for a request that begins as another one's first ``num_tokens``; as `open`."""
        copy = self._cache.fork(slot)
        held = [layers.covered(copy) for layers in self._layers]
        num_cached = max(0, min([num_tokens - 1, num_tokens - self._look_ahead, *held]))
        self._cache.truncate(copy, num_cached)
        if slot in self._owners:
            self._owners[copy] = self._owners[slot]
        self._count(num_tokens, num_cached)
        return copy, num_cached

    def release(self, slot: int, tokens: Sequence[int], is_sound: bool = True) -> None:
        """A request is over, or makes way: its slot is given back, its text kept to be shared.

        Args:
            tokens: the request's.
            is_sound: False where the entries are not to be trusted; none is kept then.
        """
        owner = self._owners.pop(slot, None)
        if owner is None or not is_sound:
            self._cache.free(slot)
            return
        # What the cache counts, not the request: an interrupted step leaves it behind. And what a
        # drafter's state does not come along with would be no hit.
        held = [self._cache.length(slot), *(layers.covered(slot) for layers in self._layers)]
        self._cache.retire(slot, owner, tokens[: min(held)])

    def distrust(self, slot: int, tokens: Sequence[int]) -> None:
        """A request with this slot read what is no number: others are not to begin with it, too.

        Args:
            tokens: the request's.
        """
        if (owner := self._owners.get(slot)) is not None:
            self._cache.distrust(slot, owner, tokens)

    def clear(self) -> None:
        """Forget all that is kept for later requests."""
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


def _owner(identity: str | None, salt: str | None) -> bytes:
    """The name that the first block of a text follows."""
    return hashlib.sha256(repr((identity, salt)).encode(errors="surrogatepass")).digest()
