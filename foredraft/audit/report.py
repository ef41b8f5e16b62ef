"""The report of an audit: its levels, each with a verdict, one sentence for all, and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foredraft.bench.report import Report, Table

SCHEMA = 1
"""Version of the JSON file. A field that is removed or changes its meaning makes a new version."""


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


@dataclass(frozen=True)
class AuditReport:
    """The findings of an audit.

    Attributes:
        subject: what was audited, in a few words, such as "at temperature 0.8 with drafter blend".
        settings: everything that the audit can be made again from.
        decisive: the names of the levels that the sentence quotes.
        seed: of all that was drawn.
    """

    subject: str
    levels: Sequence[Level]
    settings: Mapping[str, Any]
    decisive: Sequence[str]
    seconds: float
    seed: int

    @property
    def exit_code(self) -> int:
        return exit_code(self.levels)

    @property
    def sentence(self) -> str:
        code = self.exit_code
        if code == EXIT_DIFFERENT:
            found = [level for level in self.levels if level.verdict == Finding.DIFFERENT]
            verdict, quoted = "DIFFERENT", found
        elif code == EXIT_SAME:
            verdict = "nothing differs"
            quoted = [level for level in self.levels if level.name in self.decisive]
        else:
            verdict = "inconclusive"
            quoted = [level for level in self.levels if level.verdict == Finding.INCONCLUSIVE]
        said = "; ".join(f"{level.name}: {level.said}" for level in quoted)
        return f"{self.subject[:1].upper()}{self.subject[1:]}: {verdict}{said and '; '}{said}."

    def as_dict(self) -> dict[str, Any]:
        """For programs; see docs/operate/audit.md."""
        return {
            "schema": SCHEMA,
            "sentence": self.sentence,
            "exit_code": self.exit_code,
            "subject": self.subject,
            "seconds": round(self.seconds, 1),
            "settings": dict(self.settings),
            "levels": [
                {
                    "name": level.name,
                    "verdict": level.verdict,
                    "said": level.said,
                    "figures": dict(level.figures),
                    "evidence": [*map(dict, level.evidence)],
                }
                for level in self.levels
            ],
        }

    def give(self, output: str | None = None, *, as_json: bool = False) -> None:
        """Print its levels and the sentence, or the JSON; see `foredraft.bench.report.Report`."""
        columns = {"level": "{name}", "verdict": "{verdict}", "what was found": "{said}"}
        tables = [Table("", [*map(vars, self.levels)], columns)]
        report = Report(tables, self.as_dict(), [self.sentence], self.seed)
        report.give(output, as_json=as_json)
