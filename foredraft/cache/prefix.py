"""Conversations whose cache entries outlive a request: the next turn reads only what is new."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.cache.base import Cache, CacheLayers
from foredraft.core.errors import ConfigError


@dataclass(eq=False)
class Session:
    """A conversation. `Sessions` fills it in.

    Attributes:
        slot: the target's cache slot, or None before the first request.
        tokens: the tokens whose entries the slot holds.
        busy: whether a request is using it.
    """

    slot: int | None = None
    tokens: list[int] = field(default_factory=list)
    busy: bool = False


class Sessions:
    """Hands out slots, those of conversations with what they hold already.

    Args:
        cache: the target's.
        layers: of the drafter: what they lack of a conversation is read again. Layers of other
            drafters on the same cache have no say.
        look_ahead: how many tokens behind its own an entry of these layers depends on: so many
            fewer are shared with an earlier turn.
    """

    def __init__(
        self, cache: Cache, layers: Sequence[CacheLayers] = (), look_ahead: int = 0
    ) -> None:
        self._cache, self._layers, self._look_ahead = cache, tuple(layers), look_ahead
        self._dropped: deque[int] = deque()
        self._finalizers: dict[int, weakref.finalize[[int], Session]] = {}

    def check(self, session: Session) -> None:
        """Refuse a conversation whose slot someone else keeps.

        Raises:
            ConfigError: it was begun elsewhere: other layers hold its state, or another cache.
        """
        keeper = self._finalizers.get(-1 if session.slot is None else session.slot)
        known = keeper.peek() if keeper else None
        if session.slot is not None and (known is None or known[0] is not session):
            raise ConfigError(
                "this conversation was begun with another LLM or engine and goes on only there: "
                "close it there, or open another one here"
            )

    def open(self, session: Session | None, tokens: Sequence[int]) -> tuple[int, int]:
        """A slot for a request, and how many of its tokens the slot holds already.

        At least one is left to read, so that something follows it.
        """
        self.free_dropped()
        if session is None or session.slot is None:
            return self._cache.allocate(), 0
        shared = common_prefix(session.tokens, tokens) - self._look_ahead
        # A drafter's state comes along, or it is no hit.
        held = [layers.covered(session.slot) for layers in self._layers]
        num_cached = max(0, min([shared, len(tokens) - 1, *held]))
        self._cache.truncate(session.slot, num_cached)
        return session.slot, num_cached

    def release(
        self, slot: int, session: Session | None, tokens: Sequence[int], keep: bool = True
    ) -> None:
        """A request is over: its slot is freed, or waits for the conversation's next turn.

        Args:
            tokens: the request's.
            keep: False where the entries are not to be trusted; all is read again then.
        """
        if session is None:
            self._cache.free(slot)
            return
        # What the cache counts, not the request: an interrupted step leaves it behind.
        num_kept = self._cache.length(slot) if keep else 0
        session.slot, session.tokens = slot, list(tokens[:num_kept])
        if slot not in self._finalizers:
            # A conversation that nobody closed: its slot is freed with the next call from outside,
            # never from within the garbage collector, which may run at any moment.
            self._finalizers[slot] = weakref.finalize(session, self._dropped.append, slot)
            self._finalizers[slot].atexit = False

    def close(self, session: Session) -> None:
        """Give a conversation's slot back.

        Raises:
            ConfigError: a reply is under way, or it was begun elsewhere.
        """
        if session.busy:
            raise ConfigError("a reply of this conversation is under way; cancel it first")
        self.check(session)
        self.free_dropped()
        if session.slot is not None:
            self._finalizers.pop(session.slot).detach()
            self._cache.free(session.slot)
        session.slot, session.tokens = None, []

    def free_dropped(self) -> None:
        """Free the slots of conversations that nobody holds any more."""
        while self._dropped:
            slot = self._dropped.popleft()
            del self._finalizers[slot]
            self._cache.free(slot)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    for i, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return i
    return min(len(left), len(right))
