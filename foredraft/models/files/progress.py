"""How slow work, such as downloads and conversions, tells of itself."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told about slow work: what is being done, and how much of it is done."""

    def stage(self, text: str) -> None:
        """A new piece of work begins; ``text`` names it in a few words."""

    def advance(self, fraction: float) -> None:
        """The share of the current stage that is done, 0 to 1."""


class SilentProgress:
    """A `Progress` that says nothing."""

    def stage(self, text: str) -> None:
        pass

    def advance(self, fraction: float) -> None:
        pass
