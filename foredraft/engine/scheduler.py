"""Choose the requests of a step, and the tokens that each of them prefills."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence

from foredraft.core.checks import checked_int
from foredraft.engine.policy import Policy
from foredraft.engine.request import Request
from foredraft.engine.turn import Turn

MAX_STEP_TOKENS = 512
"""Most prompt tokens of a step. It bounds the memory of a forward, and the time between a row's
tokens. Where a step would be slow, `LLM` takes fewer."""

PRIORITY_ROUNDS = 1000
"""One level of priority counts like an arrival this many requests earlier. So no request starves:
one that has waited long enough goes before all new ones."""

MAX_PRIORITY = 16
"""Priorities beyond this one and its negative are clipped: the head start is bounded."""

_KEPT_SEATS = 8
"""A batch keeps this fraction (1 / value) of its seats for owners who come back."""

_LEAST_SHARE = 8
"""Prompts get at least this fraction (1 / value) of a step's tokens, however many rows decode."""


MustWait = Callable[[Request, Sequence[Request]], bool]
"""Whether a waiting request should wait for one of the running ones."""


class Scheduler:
    """One order of requests for everything: earlier arrival and higher priority go first.

    Owners take turns: a request's round is that of the request that was admitted last, or the one
    behind its owner's last request, whichever is later (self-clocked fair queueing, Golestani
    1994). So an owner who sends a hundred requests delays another owner by a single one. An owner
    with an equal share of the batch does not take its last seats while others are in it: they come
    back within moments, and would wait for more replies to end.

    The order of two requests never changes. So the others never delay the first: it is admitted
    first, reads first, and is preempted last.

    Args:
        max_batch_size: most requests in one step, of those that take part in the same steps.
        max_step_tokens: most pending tokens read in one step, if not one by one.
        must_wait: delays a request; it must not do so for ever.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_step_tokens: int = MAX_STEP_TOKENS,
        must_wait: MustWait = lambda request, running: False,
    ) -> None:
        self._max_batch_size = checked_int("max_batch_size", max_batch_size, 1)
        self._max_step_tokens, self._must_wait = max_step_tokens, must_wait
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._by_id: dict[int, Request] = {}
        self._num_waiting: Counter[Policy | None] = Counter()  # by those that share their steps
        self._arrivals = itertools.count()
        self._round = 0  # of the request that was admitted last
        self._last_round: dict[str | None, int] = {}  # by owner, where it lies ahead

    def add(self, request: Request) -> None:
        """Queue a new request."""
        owner = request.owner
        turn = max(self._round, self._last_round.get(owner, -1) + 1)
        self._last_round[owner] = turn
        request.order = (turn - _head_start(request), next(self._arrivals))
        self._by_id[request.request_id] = request
        self._wait(request)

    def next_waiting(self) -> Request | None:
        """The first request that may begin; None if none waits, or the batch has no room.

        Each earlier request that waits for another to prefill its beginning keeps a seat in the
        batch, so that later ones cannot overtake it for good. The queue is not searched while the
        batch is full.
        """
        num_taken = Counter(map(_apart, self._running))  # by those that share their steps
        if all(num_taken[apart] >= self._max_batch_size for apart in self._num_waiting):
            return None
        sated, num_kept = self._sated(), self._max_batch_size // _KEPT_SEATS
        for request in self._waiting:
            free = self._max_batch_size - num_taken[_apart(request)]
            if free <= (num_kept if request.owner in sated else 0):
                continue
            if request.is_ready and not self._must_wait(request, self._running):
                return request
            num_taken[_apart(request)] += 1
        return None

    def _sated(self) -> set[str | None]:
        """Owners with an equal share of the batch or more, where others are in it."""
        seats = Counter(row.owner for row in self._running)
        if len(seats) < 2:
            return set()
        return {owner for owner, n in seats.items() if (n + 1) * len(seats) > self._max_batch_size}

    def start(self, request: Request) -> None:
        """Move a waiting request into the batch."""
        self._stop_waiting(request)
        insort(self._running, request, key=_order)
        self._round = max(self._round, request.order[0] + _head_start(request))
        ahead = {owner: last for owner, last in self._last_round.items() if last >= self._round}
        self._last_round = ahead

    def preempt(self, request: Request) -> None:
        """Move a running request back to its position among the waiting."""
        self._running.remove(request)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        insort(self._waiting, request, key=_order)
        self._num_waiting[_apart(request)] += 1

    def _stop_waiting(self, request: Request) -> None:
        self._waiting.remove(request)
        self._num_waiting = self._num_waiting - Counter((_apart(request),))

    def next_batch(self, policy: Policy | None = None) -> list[Turn]:
        """The turns of the next step: rows that decode always take part, prompts share the rest.

        Requests of a policy that stays apart take part in its own steps only, unless others wait
        for the memory that they hold.

        Args:
            policy: the policy that the step is made for.
        """
        present = [row for row in self._running if self._waiting or _apart(row) in (None, policy)]
        left = self._max_step_tokens - sum(row.num_pending == 1 for row in present)
        left = max(left, self._max_step_tokens // _LEAST_SHARE, 1)
        turns: list[Turn] = []
        for row in present:
            num_read = 1
            if row.num_pending > 1:
                num_read = min(row.num_readable, left)
                left -= num_read
            if num_read > 0:
                turns.append(Turn(row, num_read))
        return turns

    @property
    def running(self) -> list[Request]:
        """Requests in the batch, the first in order first."""
        return list(self._running)

    def coming(self, request: Request) -> list[Request]:
        """Requests that wait and may begin along with this one: as many as there are seats."""
        free = max(0, self._max_batch_size - len(self._running) - 1)
        others = (each for each in self._waiting if each is not request and each.is_ready)
        return list(itertools.islice(others, free))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def remove(self, request: Request) -> None:
        """Take a running or waiting request out."""
        del self._by_id[request.request_id]
        if self.runs(request):
            self._running.remove(request)
        else:
            self._stop_waiting(request)
            self._give_back(request.owner)

    def _give_back(self, owner: str | None) -> None:
        """Forget the rounds of an owner's cancelled requests."""
        waiting = [row for row in self._waiting if row.owner == owner]
        last = max((row.order[0] + _head_start(row) for row in waiting), default=self._round - 1)
        self._last_round[owner] = last

    def runs(self, request: Request) -> bool:
        """Whether a request is in the batch."""
        return request in self._running

    def find(self, request_id: int) -> Request | None:
        return self._by_id.get(request_id)

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)


def _apart(request: Request) -> Policy | None:
    """The policy of a request that stays apart; None: the request runs with all others."""
    return request.policy if request.policy.is_apart else None


def _head_start(request: Request) -> int:
    return PRIORITY_ROUNDS * max(-MAX_PRIORITY, min(request.priority, MAX_PRIORITY))


def _order(request: Request) -> tuple[int, int]:
    return request.order
