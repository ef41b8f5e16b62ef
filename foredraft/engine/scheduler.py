"""Which rows take part in a step: the oldest requests first, up to a limit."""

from __future__ import annotations

from collections import deque

from foredraft.core.errors import ConfigError
from foredraft.engine.row import Row


class Scheduler:
    """First come, first served.

    Args:
        max_rows: most rows in one step.
    """

    def __init__(self, max_rows: int) -> None:
        if type(max_rows) is not int or max_rows < 1:
            raise ConfigError(
                f"max_batch_size is {max_rows!r}; it must be a whole number, 1 or more"
            )
        self._max_rows = max_rows
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []

    def add(self, row: Row) -> None:
        self._waiting.append(row)

    def admit(self) -> list[Row]:
        """Move waiting rows into the batch while there is room; returns those without a slot."""
        while self._waiting and len(self._running) < self._max_rows:
            self._running.append(self._waiting.popleft())
        return [row for row in self._running if row.request.slot < 0]

    def next_batch(self) -> list[Row]:
        """The rows of the next step. A row that has not been prefilled has a longer pending."""
        return list(self._running)

    def remove(self, row: Row) -> None:
        """Take a running or waiting row out."""
        (self._running if row in self._running else self._waiting).remove(row)

    def find(self, request_id: int) -> Row | None:
        rows = (*self._running, *self._waiting)
        return next((row for row in rows if row.request_id == request_id), None)

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)
