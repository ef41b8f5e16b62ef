"""The controller seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from foredraft.core.request import Request


class Controller(Protocol):
    """Decides how many nodes each row may draft; 0 is a legal answer."""

    def budget(self, rows: Sequence[Request]) -> list[int]: ...

    def observe(self, rows: Sequence[Request]) -> None:
        """A step over these rows has been committed."""
        ...
