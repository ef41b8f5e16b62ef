"""A picture of trainings: loss and acceptance over tokens seen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.plots import check_plot, plot_curves
from foredraft.core.errors import ConfigError
from foredraft.train.curves import read_compared


def curves(
    heads: Annotated[list[Path], typer.Argument(help="Folders of trained heads.")],
    plot: Annotated[str, typer.Option(help="Draw into this PNG.")],
) -> None:
    """Draw the curves of trainings."""
    check_plot(plot)
    compared = [head for folder in heads for head in read_compared(folder)]
    drawn = {head.name: head.curves for head in compared if head.curves}
    if not drawn:
        raise ConfigError("none of these folders has training/curves.jsonl to draw")
    plot_curves(drawn, plot)
