"""Loss and acceptance over tokens seen: JSON lines, and heads side by side."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from foredraft.drafters.text.table import BOTH, KIND
from foredraft.drafters.trained import WEIGHTS, HeadInfo, read_info
from foredraft.system.files import write_text
from foredraft.train.acceptance import tokens_a_step

TABLE, COPIES = "table", "earlier matches"
"""Sources of a table's guesses, beside `BOTH`."""
BY_DEPTH = "by depth"


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
        """Append a line, seen to reach the disk with the next state at the latest."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        if self._path.exists():
            with self._path.open("rb+") as file:
                os.fsync(file.fileno())


def read_curves(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file of curves."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # a kill in the middle of the last one
            continue
    return lines


# ---------------------------------------------------------------------------- side by side


@dataclass(frozen=True)
class ComparedHead:
    """The compared figures of a head's folder.

    Attributes:
        name: of the folder.
        parameters: numbers in its weights.
        made: how it was (`HeadInfo.provenance`).
        measured: acceptance on held-out text (`HeadInfo.measured`); of a table's only that in
            greedy text.
        curves: lines of its training; none where only the result is there.
    """

    name: str
    kind: str
    parameters: int
    made: Mapping[str, Any]
    measured: Mapping[str, Any]
    curves: Sequence[Mapping[str, Any]]

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        return [line for line in self.curves if "score" in line]

    @property
    def still_rises(self) -> bool:
        """Whether the last fifth of its training made it better: it would gain from more."""
        tests = self.evaluations
        if len(tests) < 2:
            return False
        early = [t["score"] for t in tests if t["tokens"] <= 0.8 * tests[-1]["tokens"]]
        return bool(early) and tests[-1]["score"] > 1.005 * max(early)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "parameters": self.parameters,
            "tokens": self.made.get("tokens learnt from"),
            "minutes": self.made.get("minutes"),
            "still_rises": self.still_rises,
            **{name: value for name, value in self.measured.items() if name != "score"},
        }


def read_compared(folder: Path) -> list[ComparedHead]:
    """The drafter in a folder: a head, or a table with the acceptance of copies from the text.

    Raises:
        ModelLoadError: it is no head's, or damaged.
    """
    info = read_info(folder)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    numbers = sum(map(math.prod, sizes))
    name = folder.resolve().name
    if info.kind == KIND:
        return _naming(name, numbers, info)
    curves = folder / "training" / "curves.jsonl"
    lines = read_curves(curves) if curves.exists() else []
    return [ComparedHead(name, info.kind, numbers, info.provenance, info.measured, lines)]


def _naming(name: str, numbers: int, info: HeadInfo) -> list[ComparedHead]:
    """Acceptance of drafters without layers, in greedy text."""
    made = {"tokens learnt from": info.provenance.get("reply tokens", 0)}
    names = {TABLE: name, COPIES: "copies", BOTH: f"{name} + copies"}
    compared = []
    for who, shares in info.measured["greedy"].get(BY_DEPTH, {}).items():
        measured = {"greedy": shares, "committed_greedy": tokens_a_step(shares)}
        learnt = (0, {}) if who == COPIES else (numbers, made)
        compared.append(ComparedHead(names[who], KIND, *learnt, measured, ()))
    return compared
