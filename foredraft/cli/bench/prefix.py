"""`foredraft bench prefix`: what prefix caching saves."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from foredraft.cli import options as o


@o.with_option_objects
def prefix(
    running: o.ModelOptions,
    shared: Annotated[
        int, typer.Option(min=1, help="Tokens that the second prompt shares with the first.")
    ] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 5,
    drafter: o.Drafter = "none",
    draft_model: o.DraftModel = None,
    random_weights: o.RandomWeights = None,
    json_file: o.JsonFile = None,
) -> None:
    """Time to the first token of a prompt nobody has sent, and of one that shares its beginning.

    Ends with status 1 if a reply is another one with the cache than without.
    """
    from foredraft.bench.prefix import measure_prefix
    from foredraft.bench.report import check_outputs, write_json

    check_outputs(json_file)
    asked = o.load_options(running, drafter=drafter, draft_model=draft_model, calibrate=False)
    figure = measure_prefix(o.load_llm(asked, random_weights), shared, rounds)
    Console(highlight=False, soft_wrap=True).print(
        f"first token of {figure.shared_tokens} shared tokens and some: {figure.cold_ms:.1f} ms, "
        f"with {figure.cached_tokens} of them cached {figure.warm_ms:.1f} ms "
        f"({figure.speedup:.1f}x sooner); texts {'equal' if figure.same_text else 'DIFFER'}"
    )
    if json_file:
        write_json(json_file, vars(figure) | {"speedup": figure.speedup}, 0)
    if not figure.same_text:
        raise typer.Exit(1)
