"""Reports of an audit: one sentence, Markdown for people, and JSON for programs."""

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

    def markdown(self, origin: Mapping[str, Any]) -> str:
        """A page for people.

        Args:
            origin: command, versions and machine; see `foredraft.bench.report.provenance`.
        """
        lines = [f"# {self.sentence}", "", "| level | verdict | what was found |", "|---|---|---|"]
        lines += [f"| {each.name} | {each.verdict} | {each.said} |" for each in self.levels]
        for level in self.levels:
            lines += _tables(level)
        machine = origin["machine"]
        lines += [
            "",
            "## Made with",
            "",
            f"`{origin['command']}`",
            "",
            f"{origin['date']}, foredraft {machine['versions']['foredraft']} "
            f"(revision {origin['revision']}), {machine['cpu']}, {machine['cores']} cores, "
            f"seed {self.seed}, {self.seconds:.0f} s.",
        ]
        return "\n".join([*lines, ""])

    def json(self) -> str:
        """Figures, command, versions and machine, as one JSON object."""
        return json.dumps(provenance(self.seed) | self.as_dict(), default=str)

    def write(self, json_file: str | None, page: str | None) -> None:
        """Write the named files.

        Raises:
            ConfigError: a file cannot be written.
        """
        texts = {
            json_file: self.json() + "\n",
            page: self.markdown(provenance(self.seed)),
        }
        for path, text in texts.items():
            if path is not None:
                try:
                    Path(path).write_text(text, encoding="utf-8")
                except OSError as error:
                    raise ConfigError(f"cannot write {path}: {error}") from error


def _tables(level: Level) -> list[str]:
    """A level's rows of figures and its evidence, each as a table."""
    lines: list[str] = []
    found = {name: rows for name, rows in level.figures.items() if _is_table(rows)}
    if level.evidence:
        found["evidence"] = level.evidence
    for name, rows in found.items():
        columns = [*rows[0]]
        lines += ["", f"## {level.name}: {name}", "", f"| {' | '.join(columns)} |"]
        lines += ["|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(str(row.get(key, '')) for key in columns)} |" for row in rows]
    return lines


def _is_table(rows: object) -> bool:
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], Mapping)
