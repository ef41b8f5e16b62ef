"""A progress display that only takes notes."""

from __future__ import annotations


class RecordedProgress:
    """Keeps what it was told, in order."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.fractions: list[float] = []
        self.details: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def advance(self, fraction: float, detail: str = "") -> None:
        self.fractions.append(fraction)
        self.details.append(detail)
