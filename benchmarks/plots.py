"""Pictures of measurements (extra ``plots``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare import Summary
from benchmarks.forwards import StepFigure
from foredraft.bench.report import check_outputs
from foredraft.core.errors import ConfigError


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as problem:
        raise ConfigError(
            f"plots need matplotlib: pip install 'foredraft[plots]' ({problem})"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path: str | None) -> None:
    """Find out before a long measurement whether its picture can be drawn.

    Raises:
        ConfigError: there is no folder for it, or matplotlib is not installed.
    """
    if path:
        check_outputs(path)
        pyplot()


def plot_speedups(rows: Sequence[Summary], path: str) -> None:
    """Bars of speed-up over plain decoding, by category and contender."""
    plt = pyplot()
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    figure, axes = plt.subplots(len(temperatures), 1, squeeze=False, layout="constrained",
                                figsize=(10, 3.2 * len(temperatures)))  # fmt: skip
    for axis, temperature in zip(axes[:, 0], temperatures, strict=True):
        _draw(axis, [row for row in rows if row.temperature == temperature])
        axis.set_title(f"temperature {temperature:g}", loc="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(axis: Any, rows: Sequence[Summary]) -> None:
    categories = list(dict.fromkeys(row.category for row in rows))
    contenders = [n for n in dict.fromkeys(row.contender for row in rows) if n != "none"]
    width = 0.8 / max(1, len(contenders))
    for number, contender in enumerate(contenders):
        heights = {row.category: row.speedup for row in rows if row.contender == contender}
        places = [i + (number + 0.5) * width - 0.4 for i in range(len(categories))]
        axis.bar(places, [heights[c] for c in categories], width * 0.92, label=contender)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(categories)), categories, rotation=20, ha="right")
    axis.set_ylabel("speed-up over plain")
    axis.margins(x=0.01, y=0.18)  # room for the names above the bars
    axis.legend(fontsize="small", ncols=len(contenders), loc="upper left")


def plot_lines(rows: Sequence[Summary], path: str) -> None:
    """Tokens a second by contender over categories that begin with a number, which rises."""
    plt = pyplot()
    figure, axis = plt.subplots(layout="constrained", figsize=(7, 4))
    rows = [row for row in rows if row.category != "macro"]
    for name, temperature in dict.fromkeys((row.contender, row.temperature) for row in rows):
        points = [(int(row.category.split()[0]), row.tokens_per_s) for row in rows
                  if (row.contender, row.temperature) == (name, temperature)]  # fmt: skip
        axis.plot(*zip(*points, strict=True), marker="o", label=f"{name}, T={temperature:g}")
    axis.set_xscale("log", base=2)
    _save_lines(figure, axis, "tokens read before", "tokens a second, decoding", path)


def plot_steps(figures: Sequence[StepFigure], floor_ms: Mapping[int, float], path: str) -> None:
    """Milliseconds over tokens of one forward, one row, beside the floor."""
    plt = pyplot()
    figure, axis = plt.subplots(layout="constrained", figsize=(7, 4))
    figures = [f for f in figures if f.failure is None]
    for name in dict.fromkeys(f.name for f in figures):
        points = [(f.size.tokens, f.median_ms()) for f in figures
                  if f.name == name and f.size.rows == 1]  # fmt: skip
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.plot(list(floor_ms), list(floor_ms.values()), color="black", linestyle="--", label="floor")
    _save_lines(figure, axis, "tokens in one forward", "ms", path)


def _save_lines(figure: Any, axis: Any, x_label: str, y_label: str, path: str) -> None:
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


def plot_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: str) -> None:
    """Loss, and tokens a step on held-out text, over tokens seen: a line for each head.

    Args:
        curves: lines of each head's file, by its name.
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
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
    plt.close(figure)
