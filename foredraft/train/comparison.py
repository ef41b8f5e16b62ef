"""Trained heads side by side: what each is, what it learnt from, what it reaches, its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from foredraft.drafters.heads.store import WEIGHTS, HeadInfo, read_info
from foredraft.drafters.table import BOTH, KIND
from foredraft.train.acceptance import tokens_a_step
from foredraft.train.curves import read_curves
from foredraft.train.table import BY_DEPTH, COPIES, TABLE


@dataclass(frozen=True)
class ComparedHead:
    """A head's folder, as far as it is compared.

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
    """What a folder holds: a head; of a table, also what the text's own repetitions reach.

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
    """What names tokens without computing, in greedy text."""
    made = {"tokens learnt from": info.provenance.get("reply tokens", 0)}
    names = {TABLE: name, COPIES: "copies", BOTH: f"{name} + copies"}
    found = []
    for who, shares in info.measured["greedy"].get(BY_DEPTH, {}).items():
        measured = {"greedy": shares, "committed_greedy": tokens_a_step(shares)}
        learnt = (0, {}) if who == COPIES else (numbers, made)
        found.append(ComparedHead(names[who], KIND, *learnt, measured, ()))
    return found
