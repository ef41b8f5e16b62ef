"""Loss and acceptance over tokens seen: JSON lines, and a picture of them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
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


def draw_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> bool:
    """Draw loss, and tokens a step on held-out text, over tokens seen: a line for each head.

    Args:
        curves: lines of each head's file, by its name.
        path: of the picture.

    Returns:
        False where matplotlib is not installed: there is no picture then.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    pictures = {
        "loss": "loss in training",
        "committed_greedy": "tokens a step, greedy",
        "committed_sampled": "tokens a step, temperature 1",
    }
    for axis, (key, title) in zip(axes, pictures.items(), strict=True):
        for name, lines in curves.items():
            points = [(line["tokens"] / 1000, line[key]) for line in lines if key in line]
            style = {"linewidth": 0.8} if key == "loss" else {"marker": "."}
            axis.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
        axis.set_title(title, loc="left", fontsize="medium")
        axis.set_xlabel("thousand tokens seen")
    axes[0].set_yscale("log")
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=130)
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
