"""`foredraft tune …`: settings for the user's own model, text and machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions

if TYPE_CHECKING:
    from foredraft.bench.exits import ExitFigure, Passage
    from foredraft.control.planner import Plan
    from foredraft.core.params import SamplingParams
    from foredraft.core.record import StepRecord
    from foredraft.llm import LLM

_LENGTHS = (1, 2, 3, 4, 6, 8)
"""Numbers of draft tokens to try."""

_DRAWN_LENGTH = 160
"""Tokens of a reply that a copy is rounded for."""
_AGREES_ANYWAY = 0.96
"""Share of tokens from which a better rounding gains nothing."""

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Find settings for a model on this machine."""


# ------------------------------------------------------------------------------------ tune exit


@app.command("exit")
@o.with_options
def tune_exit(
    load: Annotated[
        LoadOptions,
        o.loading(drafter="none", draft_model=None, drafter_options={}, max_batch_size=8),
    ],
    text: Annotated[
        str | None,
        typer.Option(help="A text file to judge by; replies of the model's own otherwise."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=32, help="Most tokens to judge by.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="How often to time each candidate.")] = 5,
    as_json: o.Json = False,
) -> None:
    """Find the target's best exit layer for early-exit drafting, and its speed-up.

    Each candidate's row shows the number of draft tokens that suits it best. A speed-up below 1
    says that plain decoding is faster; use another drafter then.

    Examples:

        foredraft tune exit

        foredraft tune exit --model path/to/model --text my-domain.txt
    """
    from foredraft.bench.exits import exit_report

    content = _read(text) if text else None
    figures = _measure(o.load_llm(load), content, tokens, repeats)
    best = max(figures, key=lambda figure: figure.speedup)
    if as_json:
        report = {"best": best.as_dict(), "candidates": [each.as_dict() for each in figures]}
        typer.echo(json.dumps(report))
    else:
        exit_report(figures, _advice(best)).show()


def _measure(llm: LLM, text: str | None, tokens: int, repeats: int) -> list[ExitFigure]:
    from foredraft.bench.exits import first_layer_exits, layered, measure_exits
    from foredraft.cli.display import progress_bar

    target = layered(llm.target)
    passages = _passages(llm, text, tokens)
    exits = first_layer_exits(target.num_layers)
    with progress_bar(len(exits) * (repeats + 2)) as advance:
        return measure_exits(target, passages, exits, _LENGTHS, repeats, advance)


def _passages(llm: LLM, text: str | None, tokens: int) -> list[Passage]:
    """Passages to evaluate on, with at most that many predicted tokens."""
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
    from foredraft.bench.prompts import load_prompts, prompt_ids
    from foredraft.core.params import SamplingParams

    prompts = [prompt_ids(llm, prompt) for prompt in load_prompts(None, 8)]
    params = SamplingParams(max_tokens=max(8, tokens // len(prompts)), ignore_eos=True)
    prompts = [p for p in prompts if len(p) + params.max_tokens < llm.target.max_context]
    results = llm.generate(prompts, params)
    return [([*p, *r.token_ids], len(p)) for p, r in zip(prompts, results, strict=True)]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: {error}") from error


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


# ------------------------------------------------------------------------------ tune self-draft


@app.command("self-draft")
@o.with_options
def tune_self_draft(
    load: Annotated[
        LoadOptions,
        o.loading(drafter="none", draft_model=None, drafter_options={}, max_batch_size=16),
    ],
    tokens: Annotated[
        int, typer.Option(min=512, help="Tokens of the model's own text to round for.")
    ] = 8192,
    as_json: o.Json = False,
) -> None:
    """Make a copy in 4 bits that drafts better for this model, and keep it.

    The model writes some text; each layer is then rounded so that its errors undo each other on it
    (GPTQ). That takes some minutes, once: from then on the drafter self_draft, which auto loads
    where it pays, uses the copy. A model that comes in 4 bits gains nothing by it.

    Examples:

        foredraft tune self-draft --model path/to/model
    """
    from foredraft.bench.report import Report, Table

    figures = _tuned_copies(o.load_llm(load), tokens)
    best = max(figures, key=lambda figure: figure["speedup"])
    if as_json:
        typer.echo(json.dumps({"best": best, "copies": figures}))
        return
    columns = {"copy": "{name}", "agrees at T=0": "{greedy:.1%}", "at T=1": "{sampled:.1%}",
               "time of a token": "{share:.2f} plain", "memory": "{megabytes:.0f} MB",
               "speed-up, roughly": "{speedup:.2f}x"}  # fmt: skip
    advice = f"auto takes the one with {best['bits']} bits, where it pays; so does self-draft."
    if len({figure["bits"] for figure in figures}) == len(figures):
        advice = (
            "4 bits agree so often that no other rounding can gain: nothing was made. " + advice
        )
    Report([Table("copies", figures, columns)], lines=[advice]).show()


def _tuned_copies(llm: LLM, tokens: int) -> list[dict[str, Any]]:
    """Make the copy; how well all there are draft."""
    from foredraft.bench.exits import layered
    from foredraft.cli.display import progress_bar
    from foredraft.drafters.model.self_draft import copy_figures, low_bit_target

    target = low_bit_target(llm.target)
    figures = copy_figures(target, llm.tokenizer, "as it comes")
    if figures[0]["greedy"] >= _AGREES_ANYWAY:
        return figures
    texts = _drawn_texts(llm, tokens)
    with progress_bar(layered(llm.target).num_layers) as advance:
        target.tune_copy(texts, advance)
    return [*copy_figures(target, llm.tokenizer, "rounded for its text")[:1], *figures]


def _drawn_texts(llm: LLM, tokens: int) -> list[list[int]]:
    """Replies of the model to the built-in prompts, drawn at temperature 1."""
    from foredraft.bench.prompts import load_prompts, prompt_ids
    from foredraft.cli.display import progress_bar
    from foredraft.core.params import SamplingParams

    prompts = [prompt_ids(llm, prompt) for prompt in load_prompts(None, 10)]
    length = max(16, min(_DRAWN_LENGTH, llm.target.max_context - max(map(len, prompts)) - 1))
    params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True)
    texts = list[list[int]]()
    with progress_bar(tokens // (length * len(prompts)) + 1) as advance:
        for round_number in range(tokens // (length * len(prompts)) + 1):
            results = llm.generate(prompts, replace(params, seed=round_number))
            texts += [[*p, *r.token_ids] for p, r in zip(prompts, results, strict=True)]
            advance("writing text")
    return texts


# ------------------------------------------------------------------------------------ tune load


@app.command("load")
@o.with_options
def tune_load(
    load: Annotated[LoadOptions, o.loading()],
    concurrency: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,2,4,8,16",
    prompts: o.Prompts = None,
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 0.0,
    tokens: Annotated[int, typer.Option(min=8, help="Of each reply.")] = 64,
    as_json: o.Json = False,
) -> None:
    """Show what the controller drafts under each load, with which drafter, and why.

    It writes some replies under each load and shows the last plan for a full batch.

    Examples:

        foredraft tune load --concurrency 1,4,16

        foredraft tune load --prompts my-prompts.jsonl --temperature 0.8 --json
    """

    from foredraft.bench.report import Report, Table
    from foredraft.cli.display import progress_bar
    from foredraft.core.params import SamplingParams

    counts = o.numbers("--concurrency", concurrency, int, low=1)
    if load.drafter == "none":
        raise ConfigError("drafter 'none' leaves nothing to choose; name another or leave it out")
    params = SamplingParams.of(max_tokens=tokens, temperature=temperature, seed=0, ignore_eos=True)
    load = replace(load, max_batch_size=max(counts))
    llm = o.load_llm(load)
    choices = []
    with progress_bar(len(counts)) as advance:
        for count in counts:
            choices.append(_choice(llm, load, prompts, count, params))
            advance(f"{count} at once")
    if as_json:
        typer.echo(json.dumps(choices))
    else:
        Report([Table("choices", choices, _LOAD_COLUMNS)]).show()


_LOAD_COLUMNS = {
    "at once": "{load:d}",
    "drafter": "{drafter}",
    "rows": "{rows:d}",
    "budget": "{budget:.1f}",
    "committed": "{committed_per_step:.2f}",
    "plain ms": "{plain_ms:.1f}",
    "node ms": "{node_ms:.2f}",
    "gain": "{gain:.2f}x",
    "saved": "{saved:+.1%}",
    "why": "{why}",
}


def _choice(
    llm: LLM,
    load: LoadOptions,
    prompts: str | None,
    count: int,
    params: SamplingParams,
) -> dict[str, Any]:
    """Serve some replies at this concurrency, and describe the last plan."""
    from foredraft.bench.prompts import repeated_prompts
    from foredraft.control.adaptive import AdaptiveBudget

    records: list[StepRecord] = []
    options = replace(load, max_batch_size=count)
    server = llm.with_drafter(options, trace=records.append, is_apart=True)
    for number, ids in enumerate(repeated_prompts(llm, prompts, 2 * count, params.max_tokens)):
        server.engine.submit(ids, replace(params, seed=number), server.request_options())
    controller, plan = server.controller, None
    assert isinstance(controller, AdaptiveBudget)
    while server.engine.has_work:
        records.clear()
        events = server.engine.step(server.policy)
        for failed in (e.result.error for e in events if e.result and e.result.error):
            raise RuntimeError(failed)
        num_rows = sum(len(record.rows) for record in records)
        if num_rows == count and all(record.is_decoding for record in records):
            plan = controller.plan
    if plan is None:
        raise ConfigError(
            f"replies of {params.max_tokens} tokens are too short for {count} at once"
        )
    return _described(plan, count, float(controller.report()["saved"]))


def _described(plan: Plan, load: int, saved: float) -> dict[str, Any]:
    """The plan that the controller has made under a load.

    Args:
        load: requests at once.
        saved: share of plain decoding's time that was saved; negative: lost.
    """
    from foredraft.core.cost import price_of

    pooled, rows = plan.pooled, len(plan.budgets)
    node_ms = (price_of(plan.prices, 1) - 1.0) * plan.plain_ms / load
    token_ms = 1.0 / plan.plain_rate
    if plan.is_trial:
        why = "nothing was expected to pay; trying again with a few rows"
    elif plan.drafter is None:
        why = f"{plan.reason}; a plain token takes {token_ms:.2f} ms"
    else:
        assert pooled is not None
        likely = pooled.accepted / max(pooled.nodes, 1e-9)
        why = (
            f"{likely:.0%} of its nodes are accepted at {node_ms:.2f} ms each; a plain token "
            f"takes {token_ms:.2f} ms"
        )
    return {
        "load": load,
        "drafter": plan.drafter,  # None: plain decoding
        "rows": rows,  # of the requests: those that draft
        "budget": sum(plan.budgets.values()) / rows if rows else 0.0,  # nodes of each, on average
        "committed_per_step": 1.0 + (pooled.accepted / load if pooled else 0.0),  # expected, a row
        "plain_ms": plan.plain_ms,  # of a step without drafts
        "node_ms": node_ms if plan.drafter else 0.0,  # what a node adds
        "gain": pooled.rate / plan.plain_rate if pooled else 1.0,  # expected, in throughput
        "saved": saved,
        "why": why,
    }
