"""`foredraft bench memory`: what `doctor` predicts, put to the test."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from foredraft.cli import options as o


@o.with_option_objects
def memory(
    running: o.ModelOptions,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the text in the cache.")] = 1024,
    json_file: o.JsonFile = None,
) -> None:
    """Peak memory of target and cache in a new process, beside what `doctor` predicts."""
    from foredraft.bench.memory import measure_memory
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.load import plan_models

    check_outputs(json_file)
    asked = o.load_options(running)
    plan, _ = plan_models(asked)
    figure = measure_memory(asked, plan, tokens)
    Console(highlight=False, soft_wrap=True).print(
        f"{plan.name}, {plan.number_format}, {tokens} tokens: "
        f"predicted {figure.predicted / 1e6:.1f} MB, measured {figure.measured / 1e6:.1f} MB "
        f"({figure.ratio:.2f}x)"
    )
    if json_file:
        write_json(json_file, vars(figure) | {"ratio": figure.ratio, "tokens": tokens}, 0)
