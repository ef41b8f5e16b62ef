"""`foredraft bench report`: result files as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="Where the files of `--json` lie.")],
    into: Annotated[
        Path | None, typer.Option(help="Write the page to this file instead of showing it.")
    ] = None,
) -> None:
    """One Markdown page of all result files: each figure with its command, revision and machine."""
    from foredraft.bench.report import check_outputs
    from foredraft.bench.results import render

    page = render(folder)
    if into is None:
        typer.echo(page, nl=False)
        return
    check_outputs(str(into))
    into.write_text(page)
