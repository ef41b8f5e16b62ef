"""`foredraft tune …`: finds settings on the user's own text and machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import options as o
from foredraft.cli.tune_load import tune_load
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.exits import ExitFigure, Passage
    from foredraft.bench.priors import Reply
    from foredraft.bench.prompts import BenchPrompt
    from foredraft.llm import LLM

_LENGTHS = (1, 2, 3, 4, 6, 8)
"""Numbers of draft tokens to try."""

app = typer.Typer(no_args_is_help=True, help="Find settings for a model on this machine.")
app.command("load")(tune_load)


@app.command("exit")
@o.with_option_objects
def tune_exit(
    running: o.ModelOptions,
    text: Annotated[
        str | None,
        typer.Option(help="A text file to judge by; replies of the model's own otherwise."),
    ] = None,
    skip: Annotated[
        bool, typer.Option("--skip", help="Look for sublayers to skip, not for an exit layer.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=32, help="Most tokens to judge by.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="How often to time each candidate.")] = 5,
    as_json: o.Json = False,
) -> None:
    """Where the target should exit to draft for itself, and what that comes to.

    Each candidate's row shows the number of draft tokens that suits it best. A speed-up below 1
    says that plain decoding is faster; use another drafter then.

    Examples:

        foredraft tune exit

        foredraft tune exit --model path/to/model --text my-domain.txt --skip
    """
    content = _read(text) if text else None
    asked = o.load_options(running, drafter="none", max_batch_size=8)
    llm = o.load_llm(asked)
    figures = _measure(llm, content, skip, tokens, repeats)
    best = max(figures, key=lambda figure: figure.speedup)
    if as_json:
        report = {"best": _as_dict(best), "candidates": [*map(_as_dict, figures)]}
        typer.echo(json.dumps(report))
    else:
        _show(Console(highlight=False), figures, best)


def _measure(llm: LLM, text: str | None, skip: bool, tokens: int, repeats: int) -> list[ExitFigure]:
    from foredraft.bench.exits import first_layer_exits, layered, measure_exits, skip_sets
    from foredraft.cli.progress import progress_bar

    target = layered(llm.target)
    passages = _passages(llm, text, tokens)
    exits = first_layer_exits(target.num_layers)
    if skip:
        with progress_bar(2 * target.num_layers) as advance:
            exits = skip_sets(target, passages, advance)
    with progress_bar(len(exits) * (repeats + 2)) as advance:
        return measure_exits(target, passages, exits, _LENGTHS, repeats, advance)


def _passages(llm: LLM, text: str | None, tokens: int) -> list[Passage]:
    """What to judge by, of so many predicted tokens at most."""
    from foredraft.bench.exits import Passage, split_passages

    if text is not None:
        assert llm.tokenizer is not None
        passages = [*split_passages(llm.tokenizer.encode(text)[:tokens])]
        if not passages:
            raise ConfigError("the text is too short to judge by: give some hundred words")
        return passages
    return [Passage(*reply) for reply in _replies(llm, tokens)]


def _replies(llm: LLM, tokens: int) -> list[tuple[list[int], int]]:
    """Greedy replies of the model to the built-in prompts: tokens, and where the reply starts."""
    from foredraft.bench.prompts import load_prompts
    from foredraft.core.params import SamplingParams

    prompts = [_prompt_ids(llm, prompt) for prompt in load_prompts(None, 8)]
    params = SamplingParams(max_tokens=max(8, tokens // len(prompts)), ignore_eos=True)
    prompts = [p for p in prompts if len(p) + params.max_tokens < llm.target.max_context]
    results = llm.generate(prompts, params)
    return [([*p, *r.token_ids], len(p)) for p, r in zip(prompts, results, strict=True)]


@app.command("priors")
@o.with_option_objects
def tune_priors(
    running: o.ModelOptions,
    prompts: o.Prompts = None,
    limit: o.Limit = None,
    max_tokens: o.MaxTokens = 512,
    write: Annotated[
        str | None, typer.Option(help="Where to put them, as JSON; printed otherwise.")
    ] = None,
) -> None:
    """How often the guesses of copying drafters are right, on greedy replies of the model.

    The package's own (foredraft/drafters/priors.json) are what this gives on the default
    model and the built-in prompts. They are a beginning: each text corrects them as it goes.

    Examples:

        foredraft tune priors --write foredraft/drafters/priors.json
    """
    from foredraft.bench.priors import measure_priors
    from foredraft.bench.prompts import load_prompts
    from foredraft.cli.progress import progress_bar

    asked = load_prompts(prompts, limit)
    llm = o.load_llm(o.load_options(running, drafter="none", max_batch_size=8))
    replies = [
        reply
        for start in range(0, len(asked), 8)
        for reply in _written(llm, asked[start : start + 8], max_tokens)
    ]
    with progress_bar(len(replies)) as advance:
        found = measure_priors(llm.target, replies, advance)
    num_tokens = sum(len(reply.output) for reply in replies)
    source = "the built-in prompts" if prompts is None else Path(prompts).name
    text = found.to_json(
        {
            "made_by": f"foredraft tune priors --max-tokens {max_tokens}",
            "made_of": f"{num_tokens} tokens of {running.model} on {source}",
        }
    )
    if write is None:
        typer.echo(text, nl=False)
    else:
        Path(write).write_text(text, encoding="utf-8")


def _written(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[Reply]:
    """Greedy replies, each with the document that its prompt holds behind a blank line."""
    from foredraft.bench.priors import Reply
    from foredraft.core.params import SamplingParams

    assert llm.tokenizer is not None
    ids = [_prompt_ids(llm, prompt) for prompt in prompts]
    documents = [prompt.text.partition("\n\n")[2] for prompt in prompts]
    expected = [llm.tokenizer.encode(text, add_special_tokens=False) for text in documents]
    results = llm.generate(ids, SamplingParams(max_tokens=max_tokens))
    outputs = [result.token_ids for result in results]
    return [*map(Reply, ids, outputs, expected)]


def _prompt_ids(llm: LLM, prompt: BenchPrompt) -> list[int]:
    assert llm.tokenizer is not None
    if llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode(prompt.text)
    return llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: {error}") from error


def _as_dict(figure: ExitFigure) -> dict[str, Any]:
    return {**vars(figure), "tokens_per_s": figure.tokens_per_s}


def _show(console: Console, figures: Sequence[ExitFigure], best: ExitFigure) -> None:
    from foredraft.bench.exits import describe

    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("drafts with", min_width=15, overflow="fold")
    for title in ("agree", "drafted", "per step", "draft ms", "verify ms", "tok/s", "speed-up"):
        table.add_column(title, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(
            describe(figure.options),
            f"{figure.agreement:.1%}",
            str(figure.num_draft_tokens),
            f"{figure.committed_per_step:.2f}",
            f"{figure.draft_ms:.2f}",
            f"{figure.verify_ms:.2f}",
            f"{figure.tokens_per_s:.1f}",
            f"{figure.speedup:.2f}x",
            style="bold" if figure is best else "",
        )
    console.print(table)
    console.print(_advice(best), markup=False, soft_wrap=True)


def _advice(best: ExitFigure) -> str:
    if best.speedup <= 1.0:
        return (
            "No exit pays here: plain decoding is faster. Models are seldom ready for early exit "
            "unless they were trained for it."
        )
    ((name, value),) = best.options.items()
    return (
        f"Best: --drafter early-exit --drafter-option {name.replace('_', '-')}={value} "
        f"--num-draft-tokens {best.num_draft_tokens}"
    )
