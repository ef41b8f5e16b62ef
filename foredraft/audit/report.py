"""The report of an audit: one sentence, its levels, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.audit.levels import EXIT_DIFFERENT, EXIT_SAME, Finding, Level, exit_code
from foredraft.bench.report import provenance
from foredraft.core.errors import ConfigError

SCHEMA = 1
"""Version of the JSON file. A field that is removed or changes its meaning makes a new version."""


@dataclass(frozen=True)
class AuditReport:
    """The findings of an audit.

    Attributes:
        subject: what was audited, in a few words, such as "at temperature 0.8 with drafter blend".
        levels: in order.
        settings: everything that the audit can be made again from.
        decisive: the names of the levels that the sentence quotes.
        seconds: that it took.
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
        """All of it in one sentence."""
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

    def json(self) -> str:
        """Figures, command, versions and machine, as one JSON object."""
        return json.dumps(provenance(self.seed) | self.as_dict(), default=str)

    def write(self, path: str | None) -> None:
        """Write the JSON to a file, if one is named.

        Raises:
            ConfigError: it cannot be written.
        """
        if path is None:
            return
        try:
            Path(path).write_text(self.json() + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error
