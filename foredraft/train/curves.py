"""Loss and acceptance over tokens seen: JSON lines, and a picture of them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.files import write_text


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
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # a kill in the middle of the last one
            continue
    return found


def draw_curves(lines: list[dict[str, Any]], path: Path) -> bool:
    """Draw loss, and tokens a step, over tokens seen.

    Returns:
        False where matplotlib is not installed: there is no picture then.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    steps = [line for line in lines if "loss" in line]
    left.plot([line["tokens"] for line in steps], [line["loss"] for line in steps], linewidth=0.8)
    left.set_xlabel("tokens seen")
    left.set_ylabel("loss")
    tests = [line for line in lines if "score" in line]
    for name, label in (("committed_greedy", "greedy"), ("committed_sampled", "temperature 1")):
        right.plot([t["tokens"] for t in tests], [t[name] for t in tests], marker=".", label=label)
    right.set_xlabel("tokens seen")
    right.set_ylabel("tokens a step, held-out text")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


class Recent:
    """Means over the last steps."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self.loss, self.tokens_per_s = math.nan, 0.0
        self.overlap: tuple[float, ...] = ()
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic()
        self._losses: list[float] = []
        self._overlaps: list[list[float]] = []
        self._tokens, self._seconds = 0, 0.0

    def add(self, loss: float, overlap: list[float], tokens: int, seconds: float) -> None:
        self._losses.append(loss)
        self._overlaps.append(overlap)
        self._tokens += tokens
        self._seconds += seconds
        num = len(self._losses)
        self.loss = sum(self._losses) / num
        depths = zip(*self._overlaps, strict=False)  # the first depth alone, for a while
        self.overlap = tuple(round(sum(each) / num, 4) for each in depths)
        self.tokens_per_s = self._tokens / max(1e-9, self._seconds)

    def is_due(self) -> bool:
        return time.monotonic() - self._began >= self._every_s
