"""`foredraft drafters`: what can draft, what each needs, and its options."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foredraft.cli import options as o

if TYPE_CHECKING:
    from foredraft.drafters.spec import DrafterSpec


def list_drafters(
    name: Annotated[str | None, typer.Argument(help="Show the options of this one.")] = None,
    as_json: o.Json = False,
) -> None:
    """List the drafters, other packages' included, or show the options of one."""
    from foredraft.drafters import drafter_key, drafter_spec, usable_specs

    specs = usable_specs() if name is None else {drafter_key(name): drafter_spec(name)}
    if as_json:
        typer.echo(json.dumps({name: described(spec) for name, spec in specs.items()}))
    elif name is None:
        _show_all(specs)
    else:
        _show_one(drafter_key(name), specs[drafter_key(name)])


def described(spec: DrafterSpec) -> dict[str, Any]:
    """A drafter as plain data."""
    return {
        "summary": spec.summary,
        "needs": needs_of(spec),
        "num_draft_tokens": spec.num_draft_tokens,
        "copies": spec.copies,
        "trainable": spec.head is not None,
        "options": dict(spec.options),
    }


def needs_of(spec: DrafterSpec) -> list[str]:
    """What a drafter cannot do without."""
    needs = []
    if spec.trained is not None:
        needs.append(f"a trained {spec.trained} (option head), unless one comes with the model")
    if spec.needs_draft_model:
        vocabulary = "of any vocabulary" if spec.draft_model == "any vocabulary" else ""
        instead = f"or option {spec.instead_of_model}" if spec.instead_of_model else ""
        needs.append(" ".join(filter(None, ("a draft model", vocabulary, instead))))
    if spec.needs_in_words:
        needs.append(spec.needs_in_words)
    if spec.reads_prediction is True:
        needs.append("a prediction of the reply")
    return needs


def _show_all(specs: dict[str, DrafterSpec]) -> None:
    table = Table("drafter", "what it does", "what it needs", box=None, header_style="bold")
    for name, spec in specs.items():
        table.add_row(name, escape(spec.summary), escape("; ".join(needs_of(spec))))
    console = Console(highlight=False)
    console.print(table)
    console.print("\nforedraft drafters NAME shows the options of one.")


def _show_one(name: str, spec: DrafterSpec) -> None:
    console = Console(highlight=False)
    console.print(f"{name}: {spec.summary}", markup=False)
    for need in needs_of(spec):
        console.print(f"needs {need}", markup=False)
    console.print(f"drafts up to {spec.num_draft_tokens} tokens a step\n")
    if spec.options:
        table = Table("option", "what it sets (default)", box=None, header_style="bold")
        for option, text in spec.options.items():
            table.add_row(option, escape(text))
        console.print(table)
        console.print(f"\n--drafter {name} --drafter-option NAME=VALUE", markup=False)
