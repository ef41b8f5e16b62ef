"""Loss and acceptance over tokens seen, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.system.files import write_text


class Curves:
    """A file of JSON lines, each with ``tokens`` and ``seconds``; steps and evaluations.

    Args:
        path: of the file.
        tokens: how far the training has come: lines of what a kill has undone are dropped.
    """

    def __init__(self, path: Path, tokens: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [line for line in read_curves(path) if line["tokens"] <= tokens]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_curves(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file of curves."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # a kill in the middle of the last one
            continue
    return lines
