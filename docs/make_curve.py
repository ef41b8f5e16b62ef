"""Draws docs/images/curve.svg: the speed-up of single categories by the tokens that a step commits.

``python docs/make_curve.py`` reads docs/results/pair*.json and needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
KERNELS = {"AVX-512": "", "AVX2": "-avx2"}
COLORS = {"AVX-512": "#0969da", "AVX2": "#bc4c00"}
MARKS = {0.0: "o", 1.0: "^"}
COSTS = (1.5, 2.0, 3.0)
"""Of a step with its drafts, in plain steps."""
_END = 12.0


def points(suffix: str) -> list[dict[str, Any]]:
    """The categories of the runs with one set of kernels."""
    found: list[dict[str, Any]] = []
    for name in (f"pair{suffix}.json", f"pair-humaneval{suffix}.json"):
        summaries = json.loads((DOCS / "results" / name).read_text())["summaries"]
        found += [each for each in summaries if each["contender"] == "auto"]
    return [each for each in found if each["category"] != "overall"]


def name_line(axes: Any, name: str, height: float, color: str) -> None:
    """Write a name behind the right end of a line."""
    where = {"xytext": (4, -3), "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(name, (_END, height), fontsize=8, color=color, **where)


def draw() -> None:
    # The same file for the same results, and text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "foredraft", "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(8.0, 3.6), layout="constrained")
    for cost in COSTS:
        axes.plot([1.0, _END], [1.0 / cost, _END / cost], color="#8c959f", lw=0.8, ls=":", zorder=1)
        name_line(axes, f"a step costs {cost:g} plain ones", _END / cost, "#57606a")
    axes.axhline(1.0, color="#cf222e", lw=1.0)
    name_line(axes, "plain decoding", 1.0, "#cf222e")
    for kernels, suffix in KERNELS.items():
        for temperature, mark in MARKS.items():
            here = [each for each in points(suffix) if each["temperature"] == temperature]
            axes.scatter(
                [each["committed_per_step"] for each in here],
                [each["speedup"] for each in here],
                *(18, COLORS[kernels]),
                marker=mark,
                label=f"{kernels}, temperature {temperature:g}",
                zorder=2,
            )
    axes.set(xscale="log", yscale="log", xlim=(1.0, _END), ylim=(0.7, 8.0))
    axes.set_xticks([1, 2, 3, 4, 6, 8, 12], ["1", "2", "3", "4", "6", "8", "12"])
    axes.set_yticks([1, 2, 3, 4, 6, 8], ["1x", "2x", "3x", "4x", "6x", "8x"])
    axes.minorticks_off()
    axes.set(xlabel="tokens that a step commits, by category", ylabel="speed-up")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "images" / "curve.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw()
