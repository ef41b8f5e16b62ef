"""`foredraft drafters`: what can draft, what each needs, and its options."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import options as o
from foredraft.cli.display import say

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
    """Requirements of a drafter."""
    needs = []
    if spec.trained is not None:
        needs.append(f"a trained {spec.trained} (option head), unless one comes with the model")
    if spec.needs_draft_model:
        vocabulary = "of any vocabulary" if spec.draft_model == "any vocabulary" else ""
        needs.append(f"a draft model {vocabulary}".rstrip())
    if spec.needs_in_words:
        needs.append(spec.needs_in_words)
    if spec.reads_prediction is True:
        needs.append("a prediction of the reply")
    return needs


def _show_all(specs: dict[str, DrafterSpec]) -> None:
    from foredraft.bench.report import Report, Table

    rows = [
        {"name": name, "summary": spec.summary, "needs": "; ".join(needs_of(spec))}
        for name, spec in specs.items()
    ]
    columns = {"drafter": "{name}", "what it does": "{summary}", "what it needs": "{needs}"}
    more = "\nforedraft drafters NAME shows the options of one."
    Report([Table("", rows, columns)], lines=[more]).show()


def _show_one(name: str, spec: DrafterSpec) -> None:
    from foredraft.bench.report import Report, Table

    say(f"{name}: {spec.summary}")
    for need in needs_of(spec):
        say(f"needs {need}")
    say(f"drafts up to {spec.num_draft_tokens} tokens a step\n")
    if spec.options:
        rows = [{"option": option, "text": text} for option, text in spec.options.items()]
        columns = {"option": "{option}", "what it sets (default)": "{text}"}
        how = f"\n--drafter {name} --drafter-option NAME=VALUE"
        Report([Table("", rows, columns)], lines=[how]).show()
