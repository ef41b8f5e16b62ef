"""Which rows take part in a step, and how much of its text each of them reads."""

from __future__ import annotations

from collections import deque

from foredraft.core.errors import ConfigError
from foredraft.engine.row import Row, Turn

MAX_STEP_TOKENS = 512
"""Most prompt tokens that a step reads: nobody waits longer than that for the next token, and the
memory of a forward stays bounded."""


class Scheduler:
    """First come, first served. Rows that decode always take part; prompts share what is left.

    Args:
        max_rows: most rows in one step.
        max_step_tokens: most pending tokens read in one step, if not one by one.
    """

    def __init__(self, max_rows: int, max_step_tokens: int = MAX_STEP_TOKENS) -> None:
        if type(max_rows) is not int or max_rows < 1:
            raise ConfigError(
                f"max_batch_size is {max_rows!r}; it must be a whole number, 1 or more"
            )
        self._max_rows, self._max_step_tokens = max_rows, max_step_tokens
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []

    def add(self, row: Row) -> None:
        self._waiting.append(row)

    def admit(self) -> list[Row]:
        """Move waiting rows into the batch while there is room; returns those without a slot."""
        while self._waiting and len(self._running) < self._max_rows:
            self._running.append(self._waiting.popleft())
        return [row for row in self._running if row.request.slot < 0]

    def next_batch(self) -> list[Turn]:
        """The turns of the next step, the oldest row first."""
        left = self._max_step_tokens - sum(row.num_pending == 1 for row in self._running)
        turns: list[Turn] = []
        for row in self._running:
            num_read = 1
            if row.num_pending > 1:
                num_read = min(row.num_pending, left)
                left -= num_read
            if num_read > 0 or not turns:
                turns.append(Turn(row, max(1, num_read)))
        return turns

    @property
    def running(self) -> list[Row]:
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
