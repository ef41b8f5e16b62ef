"""Levels of an audit, with a verdict for each and one for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Finding(StrEnum):
    """The verdict of a level."""

    SAME_BITS = "same bits"
    NEAR_TIES = "same but for near-ties"
    SAME_LAW = "same law at this power"
    ALL_FOUND = "all planted faults found"
    DIFFERENT = "DIFFERENT"
    INCONCLUSIVE = "inconclusive"
    NOT_ASKED = "does not apply"


EXIT_SAME, EXIT_DIFFERENT, EXIT_INCONCLUSIVE = 0, 1, 3
"""Exit status of the command; 2 is for what cannot be used."""


@dataclass(frozen=True)
class Level:
    """The result of one kind of test.

    Attributes:
        name: of the level.
        said: the finding, or the reason why there is none, in a sentence.
        figures: counts, statistics and p-values by name.
        evidence: differences: token, position and size.
    """

    name: str
    verdict: Finding
    said: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    evidence: Sequence[Mapping[str, Any]] = ()


def exit_code(levels: Iterable[Level]) -> int:
    """Different where any level is; else inconclusive where any is; else the same."""
    verdicts = {level.verdict for level in levels}
    if Finding.DIFFERENT in verdicts:
        return EXIT_DIFFERENT
    decided = verdicts - {Finding.INCONCLUSIVE, Finding.NOT_ASKED}
    return EXIT_INCONCLUSIVE if Finding.INCONCLUSIVE in verdicts or not decided else EXIT_SAME
