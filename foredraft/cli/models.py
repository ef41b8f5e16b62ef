"""`foredraft models …`: the models that are kept on this machine."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from foredraft.cli import options as o
from foredraft.cli.display import RichProgress, megabytes, say, show_facts
from foredraft.system.paths import cache_root

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Download, list, describe or remove models."""


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="As --model elsewhere, such as org/name:Q4_K_M.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub.")] = None,
) -> None:
    """Download a model, or the rest of one whose download was cut. A model that is here stays."""
    from foredraft.models.files.store import resolve_model

    with RichProgress() as progress:
        directory = resolve_model(model, revision=revision, progress=progress)
    say(f"{model} is here: {directory}")


@app.command("list")
def list_models(as_json: o.Json = False) -> None:
    """List packaged models, those of the hub that are here, and what is kept of models."""
    from foredraft.bench.report import Report, Table
    from foredraft.models.files.local import local_models

    found = local_models()
    if as_json:
        listed = [vars(each) | {"folder": str(each.folder)} for each in found]
        typer.echo(json.dumps(listed))
        return
    rows = []
    for each in found:
        place = f"{each.folder.parent.name}/{each.folder.name}"
        if each.is_gone:
            place += ", its model is gone"
        if not each.is_here:
            place = "downloaded by its first use"
        size = megabytes(each.num_bytes)
        rows.append({"model": each.model, "kind": each.kind, "size": size, "place": place})
    columns = {"model": "{model}", "kind": "{kind}", "size": "{size}", "where": "{place}"}
    Report([Table("", rows, columns)], lines=[f"\nin {cache_root()}"]).show()


@app.command()
def show(
    model: Annotated[str, typer.Argument(help="As --model elsewhere.")],
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of one text that memory is predicted for.")
    ] = 4096,
    as_json: o.Json = False,
) -> None:
    """Describe a model, without its weights if these are not here: will it fit, and how fast."""
    from foredraft.cli.doctor import model_report
    from foredraft.load import plan_models
    from foredraft.options import LoadOptions

    with RichProgress() as progress:
        options = LoadOptions(model=model, drafter="none")
        plan, _ = plan_models(options, progress, with_weights=False)
    about = model_report(plan, options, context)
    if as_json:
        typer.echo(json.dumps(about))
        return
    lines = about.pop("notes") + about.pop("remarks")
    show_facts(about)
    for line in lines:
        say(line)


@app.command()
def rm(
    model: Annotated[str, typer.Argument(help="A model or folder of `foredraft models list`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete all that foredraft keeps of a model. It is made or downloaded again when needed.

    A model of the hub goes from the hub's cache, which other programs share. A GGUF file or a
    directory of your own is never touched.
    """
    from foredraft.models.files.local import remove

    if not yes and sys.stdin.isatty():
        typer.confirm(f"Delete all that is kept of {model}?", abort=True)
    for each in remove(model):
        say(f"deleted {each.folder} ({megabytes(each.num_bytes)})")
