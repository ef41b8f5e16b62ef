"""Runs of a comparison, kept as they are made: a long one goes on where it was stopped.

JSON lines: what is compared, then a line for each prompt and temperature with all contenders'
runs. A line that a kill has cut is measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare import Runs
from benchmarks.contenders import ContenderRun
from foredraft.core.errors import ConfigError
from foredraft.core.record import SpeculationStats


class TrialLog:
    """Keeps runs in a file.

    Args:
        path: the file; it need not be there.
        compared: what decides about the figures: machine, model, contenders, parameters.

    Raises:
        ConfigError: the file is of another comparison, or cannot be used.
    """

    def __init__(self, path: Path, compared: Mapping[str, Any]) -> None:
        self._path = path
        first, *lines = self._read() or [dict(compared)]
        if first != json.loads(json.dumps(compared)):
            differ = sorted(
                name for name in {*first, *compared} if first.get(name) != compared.get(name)
            )
            raise ConfigError(
                f"{path} holds runs of another comparison ({', '.join(differ)} differ): name a new "
                "file, or repeat the command that wrote it"
            )
        self._known = {(line["prompt"], line["temperature"]): line["runs"] for line in lines}
        self._write([first, *lines])

    def __len__(self) -> int:
        """Prompts that have been run, each at each temperature counted."""
        return len(self._known)

    def find(self, prompt: str, temperature: float) -> Runs | None:
        """Earlier measurements."""
        runs = self._known.get((prompt, temperature))
        return None if runs is None else {name: _run_of(said) for name, said in runs.items()}

    def add(self, prompt: str, temperature: float, runs: Runs) -> None:
        """Keep all contenders' runs of a prompt."""
        said = {name: asdict(run) for name, run in runs.items()}
        line = {"prompt": prompt, "temperature": temperature, "runs": said}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        if not all(isinstance(line, dict) for line in found):
            raise ConfigError(f"{self._path} holds no runs of `python -m benchmarks drafters`")
        return found

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error}") from error


def _run_of(said: Mapping[str, Any]) -> ContenderRun:
    stats = said["stats"]
    return ContenderRun(
        **dict(said)
        | {
            "token_ids": tuple(said["token_ids"]),
            "stats": None if stats is None else SpeculationStats(**stats),
        }
    )
