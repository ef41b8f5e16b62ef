"""`foredraft models …`: the models that are kept on this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options as o
from foredraft.cli.display import megabytes, say
from foredraft.system.paths import cache_root

if TYPE_CHECKING:
    from foredraft.models.files.local import LocalFiles

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """List, describe or remove the models that are kept here."""


@app.command("list")
def list_models(as_json: o.Json = False) -> None:
    """List packaged models, and what is kept of these and other models, with sizes."""
    from foredraft.bench.report import Report, Table
    from foredraft.models.files.local import local_models

    found = local_models()
    if as_json:
        listed = [vars(each) | {"folder": str(each.folder)} for each in found]
        typer.echo(json.dumps(listed))
        return
    rows = [
        {"model": each.model, "kind": each.kind, "size": megabytes(each.num_bytes)}
        | {"place": _place(each)}
        for each in found
    ]
    columns = {"model": "{model}", "kind": "{kind}", "size": "{size}", "where": "{place}"}
    Report([Table("", rows, columns)], lines=[f"\nin {cache_root()}"]).show()


def _place(files: LocalFiles) -> str:
    if not files.is_here:
        return "downloaded by its first use"
    place = f"{files.folder.parent.name}/{files.folder.name}"
    return f"{place}, its model is gone" if files.is_gone else place


@app.command()
def show(
    model: Annotated[str, typer.Argument(help="As --model elsewhere.")], as_json: o.Json = False
) -> None:
    """Describe a model: its family, formats, size and context. `foredraft doctor` says more."""
    from foredraft.load import plan_models
    from foredraft.options import LoadOptions

    with o.progress() as progress:
        plan, _ = plan_models(LoadOptions(model=model, drafter="none"), progress)
    config = plan.checkpoint.config if plan.checkpoint else {}
    about = {
        "name": plan.name,
        "directory": str(plan.directory),
        "family": config.get("model_type"),
        "formats": list(plan.formats),
        "parameters": plan.num_parameters,
        "weight_bytes": plan.weight_bytes,
        "max_context": plan.max_context,
        "layers": config.get("num_hidden_layers"),
        "vocabulary": config.get("vocab_size"),
    }
    if as_json:
        typer.echo(json.dumps(about))
        return
    for name, value in about.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        if shown not in (None, ""):
            say(f"{name.replace('_', ' '):<14}{shown}")


@app.command()
def rm(
    model: Annotated[str, typer.Argument(help="A model or folder of `foredraft models list`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete all that foredraft keeps of a model. It is made or downloaded again when needed.

    A GGUF file or a directory of your own is never touched.
    """
    from foredraft.models.files.local import remove

    if not yes and sys.stdin.isatty():
        typer.confirm(f"Delete all that is kept of {model}?", abort=True)
    for each in remove(model):
        say(f"deleted {each.folder} ({megabytes(each.num_bytes)})")
