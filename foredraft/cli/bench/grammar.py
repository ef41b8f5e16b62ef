"""`foredraft bench grammar`: JSON by a schema, its validity and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.cli.progress import progress_bar

if TYPE_CHECKING:
    from foredraft.llm import LLM


@o.with_option_objects
def grammar(
    running: o.ModelOptions,
    draft: o.DraftOptions,
    replies: Annotated[int, typer.Option(min=1, help="How many replies to draw.")] = 500,
    timed: Annotated[int, typer.Option(min=1, help="How many beside free text.")] = 100,
    temperature: Annotated[float, typer.Option(help="Of the replies.")] = 1.0,
    json_file: o.JsonFile = None,
) -> None:
    """Draw JSON by a schema, check each reply, and time some against free text of the same length.

    Ends with status 1 if a reply is not what the schema describes.

    Examples:

        foredraft bench grammar --replies 50

        foredraft bench grammar --json docs/results/grammar.json
    """
    from foredraft.bench.grammar import measure_grammar, summary
    from foredraft.bench.report import check_outputs, write_json

    check_outputs(json_file)
    llm = o.load_llm(o.load_options(running, draft))
    runs = []
    with progress_bar(replies) as advance:
        for run in measure_grammar(llm, replies, temperature, timed):
            runs.append(run)
            advance("drawing")
    found = summary(runs)
    _print(Console(highlight=False), llm, found, temperature)
    if json_file:
        name = llm.plan.name if llm.plan else None
        figures = {"model": name, "drafter": llm.drafter_name, "temperature": temperature}
        write_json(json_file, figures | found, 0)
    if found["invalid"]:
        raise typer.Exit(1)


def _print(console: Console, llm: LLM, found: dict[str, Any], temperature: float) -> None:
    console.print(
        f"{found['valid']} of {found['replies']} replies valid at temperature {temperature}; "
        f"{found['tokens']} tokens, {100 * found['accepted_share']:.0f} % of them drafted "
        f"({llm.drafter_name})",
        soft_wrap=True,
    )
    console.print(
        f"{found['ms_per_token']} ms a token with the grammar, {found['free_ms_per_token']} "
        f"without: {100 * found['slower_by']:+.1f} %",
        soft_wrap=True,
    )
    for invalid in found["invalid"]:
        console.print(f"seed {invalid['seed']}: {invalid['text']!r}", markup=False, soft_wrap=True)
