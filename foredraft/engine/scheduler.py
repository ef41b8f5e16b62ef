"""Which rows take part in a step, and how much of its text each of them reads."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Sequence

from foredraft.core.errors import ConfigError
from foredraft.engine.row import Row, Turn

MAX_STEP_TOKENS = 512
"""Most prompt tokens that a step reads: nobody waits longer than that for the next token, and the
memory of a forward stays bounded."""

PRIORITY_STEPS = 1000
"""A priority of one more counts like having come so many steps earlier. So nobody waits for ever:
whoever came long enough ago goes before all that come now."""

MAX_PRIORITY = 16
"""Higher and lower priorities count like this one and its negative: the head start is bounded."""

_LEAST_SHARE = 8
"""Prompts get at least one part in so many of a step's tokens, however many rows decode."""


MustWait = Callable[[Row, Sequence[Row]], bool]
"""Whether a waiting row is to wait for one of those that run."""


class Scheduler:
    """Rows in one order for everything: the first to come and the higher priority goes first.

    The order of two rows never changes. So the first of them is never held up by the others: it
    is admitted first, reads first, and is the last to give its place in the cache away.

    Args:
        max_rows: most rows in one step.
        max_step_tokens: most pending tokens read in one step, if not one by one.
        must_wait: keeps a row from beginning now; it must not do so for ever.
    """

    def __init__(
        self,
        max_rows: int,
        max_step_tokens: int = MAX_STEP_TOKENS,
        must_wait: MustWait = lambda row, running: False,
    ) -> None:
        if type(max_rows) is not int or max_rows < 1:
            raise ConfigError(
                f"max_batch_size is {max_rows!r}; it must be a whole number, 1 or more"
            )
        self._max_rows, self._max_step_tokens = max_rows, max_step_tokens
        self._must_wait = must_wait
        self._waiting: list[Row] = []
        self._running: list[Row] = []
        self._arrivals = itertools.count()
        self._num_steps = 0

    def add(self, row: Row) -> None:
        """A row arrives."""
        priority = max(-MAX_PRIORITY, min(row.priority, MAX_PRIORITY))
        came = self._num_steps - PRIORITY_STEPS * priority
        row.order = (came, next(self._arrivals))
        insort(self._waiting, row, key=_order)

    def next_waiting(self) -> Row | None:
        """The first row that may begin; None when the batch is full or nobody waits.

        A place in the batch is kept for each row before it that waits for another to read what it
        begins with: nobody passes it for good.
        """
        num_places = self._max_rows - len(self._running)
        for row in self._waiting:
            if num_places <= 0:
                return None
            if row.is_ready and not self._must_wait(row, self._running):
                return row
            num_places -= 1
        return None

    def start(self, row: Row) -> None:
        """A waiting row enters the batch."""
        self._waiting.remove(row)
        insort(self._running, row, key=_order)

    def preempt(self, row: Row) -> None:
        """A running row waits again, in its old place."""
        self._running.remove(row)
        insort(self._waiting, row, key=_order)

    def next_batch(self) -> list[Turn]:
        """The turns of the next step: rows that decode always take part, prompts share the rest."""
        self._num_steps += 1
        left = self._max_step_tokens - sum(row.num_pending == 1 for row in self._running)
        left = max(left, self._max_step_tokens // _LEAST_SHARE, 1)
        turns: list[Turn] = []
        for row in self._running:
            num_read = 1
            if row.num_pending > 1:
                num_read = min(row.num_readable, left)
                left -= num_read
            if num_read > 0:
                turns.append(Turn(row, num_read))
        return turns

    @property
    def running(self) -> list[Row]:
        """Rows in the batch, the first in order first."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def remove(self, row: Row) -> None:
        """Take a running or waiting row out."""
        (self._running if row in self._running else self._waiting).remove(row)

    def find(self, request_id: int) -> Row | None:
        rows = (*self._running, *self._waiting)
        return next((row for row in rows if row.request_id == request_id), None)

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)


def _order(row: Row) -> tuple[int, int]:
    return row.order
