"""The controller seam."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from foredraft.core.sequence import Sequence


class Controller(Protocol):
    """Decides how many nodes each row may draft; 0 is a legal answer."""

    def budget(self, rows: Rows[Sequence]) -> list[int]: ...

    def observe(self, rows: Rows[Sequence]) -> None:
        """A step over these rows has been committed."""
        ...
