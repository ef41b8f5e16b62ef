"""A progress display that only takes notes."""

from __future__ import annotations


class RecordedProgress:
    """Keeps what it was told, in order."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.fractions: list[float] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def advance(self, fraction: float) -> None:
        self.fractions.append(fraction)
