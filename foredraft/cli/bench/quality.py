"""`foredraft bench quality`: what a number format does to the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import options as o
from foredraft.cli.progress import progress_bar
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.quality import Quality
    from foredraft.load import ModelPlan


@o.with_option_objects
def quality(
    running: o.ModelOptions,
    text: Annotated[
        str | None, typer.Option(help="A text file; a built-in text when not given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use at most so many tokens.")] = None,
    json_file: o.JsonFile = None,
) -> None:
    """Compare the model as it would run with itself in float32, token by token.

    The divergence says how far the next-token distributions are apart; the perplexity, how well
    each predicts the text.

    Examples:

        foredraft bench quality --weights int8

        foredraft bench quality --weights int8 --text book.txt --limit 20000
    """
    from foredraft.bench.quality import measure_quality, windows
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.bench.texts import read_text
    from foredraft.load import load_target, plan_models

    check_outputs(json_file)
    if limit is not None and limit < 2:
        raise ConfigError(f"--limit is {limit}; the second token is the first to be predicted")
    content = read_text(text)
    asked = o.load_options(running, drafter="none", calibrate=False)
    llm = o.load_llm(asked)
    assert llm.plan is not None
    assert llm.tokenizer is not None
    texts = windows(llm.tokenizer.encode(content), limit)
    if not texts:
        raise ConfigError(f"{text} is a single token; none follows it that could be predicted")
    in_full, _ = plan_models(replace(asked, dtype="float32", weights="auto"))
    reference = load_target(in_full)
    with progress_bar(len(texts)) as advance:
        found = measure_quality(reference, llm.target, texts, lambda: advance("scoring"))
    _print_quality(Console(highlight=False), llm.plan, found, text or "the built-in text")
    if json_file:
        figures = {
            "model": llm.plan.name,
            "dtype": llm.plan.dtype,
            "weights": llm.plan.weights,
            "text": text,
            "quality": found.as_dict(),
        }
        write_json(json_file, figures, 0)


def _print_quality(console: Console, plan: ModelPlan, found: Quality, source: str) -> None:
    console.print(
        f"{plan.name}, {plan.number_format}, {plan.decoder} kernels, against float32; "
        f"{found.num_tokens} tokens of {source}",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("KL divergence, mean", f"{found.mean_kl:.5f} nats")
    table.add_row("KL divergence, 99th percentile", f"{found.p99_kl:.5f} nats")
    table.add_row("same most likely token", f"{100 * found.top1_agreement:.2f} %")
    table.add_row("perplexity", f"{found.perplexity:.4f}")
    table.add_row("perplexity in float32", f"{found.reference_perplexity:.4f}")
    console.print(table)
