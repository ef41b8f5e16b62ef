"""`foredraft generate`: continue a prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.plan import DEFAULT_MODEL

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.measure import MeasuredRun


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; '-' reads standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a message to a chat model.")
    ] = False,
    model: o.Model = DEFAULT_MODEL,
    drafter: o.Drafter = "auto",
    draft_model: o.DraftModel = None,
    num_draft_tokens: o.NumDraftTokens = None,
    drafter_option: o.DrafterOptions = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            "--prediction",
            help="A file with text that the reply is expected to repeat; '-' reads standard input.",
            rich_help_panel="Drafting",
        ),
    ] = None,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    max_tokens: o.MaxTokens = 256,
    stop: o.Stop = None,
    coupling: o.Coupling = "seeded",
    dtype: o.Dtype = "auto",
    weights: o.Weights = "auto",
    device: o.Device = "auto",
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    exact: o.Exact = False,
    max_context: o.MaxContext = None,
    as_json: o.Json = False,
) -> None:
    """Continue a prompt; accepted draft tokens are underlined.

    The text is what the model alone would write: with the same seed it does not depend on the
    drafter.

    Examples:

        foredraft generate "Once upon a time"

        foredraft generate --chat "Name three rivers." --temperature 0.8 --seed 7

        foredraft generate - --drafter none --json < prompt.txt

        foredraft generate --chat "Rename total to result: …" --prediction code.py
    """
    from foredraft.core.params import SamplingParams

    params = SamplingParams.of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        max_tokens=max_tokens, stop=tuple(stop or ()), coupling=coupling,
        prediction=_read_prediction(prediction, prompt),
    )  # fmt: skip
    if prediction is not None and drafter == "auto" and draft_model is None:
        drafter = "prediction"
    asked = o.load_options(
        model, drafter_option, drafter=drafter, draft_model=draft_model,
        num_draft_tokens=num_draft_tokens, dtype=dtype, weights=weights, device=device,
        backend=backend, threads=threads, exact=exact, max_context=max_context, max_batch_size=1,
    )  # fmt: skip
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = o.load_llm(asked)
    messages = [{"role": "user", "content": text}]
    events = llm.stream_chat(messages, params) if chat else llm.stream(text, params)
    _run(llm, events, text, as_json)


def _read_prediction(path: Path | None, prompt: str) -> str | None:
    if path is None:
        return None
    if str(path) == "-":
        if prompt == "-":
            raise ConfigError("the prompt and the prediction cannot both be standard input")
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prediction {path} cannot be read: {error}") from error


def _run(llm: LLM, events: Any, prompt: str, as_json: bool) -> None:
    from foredraft.cli.display import legend, show_pieces, stats_line
    from foredraft.measure import measure

    if as_json:
        run = measure(events)
        typer.echo(json.dumps(_report(llm, run, prompt), ensure_ascii=False))
    else:
        console = Console(highlight=False)
        run = measure(events, lambda event: show_pieces(console, event.pieces))
        console.print()
        notes = Console(stderr=True, highlight=False)
        if run.result.stats.accepted and console.is_terminal:
            notes.print(legend())
        notes.print(stats_line(run.result.stats, run.tokens_per_s))
    if run.result.error:
        Console(stderr=True).print(f"error: {run.result.error}", style="red", markup=False)
        raise typer.Exit(1)


def _report(llm: LLM, run: MeasuredRun, prompt: str) -> dict[str, Any]:
    from foredraft.cli.display import stats_dict

    result = run.result
    return {
        "model": llm.plan.name if llm.plan else None,
        "drafter": llm.drafter_name,
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "num_prompt_tokens": result.num_prompt_tokens,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "seed": result.seed,
        "stats": stats_dict(result.stats),
        "first_token_s": round(run.first_event_s, 4),
        "total_s": round(run.total_s, 4),
        "tokens_per_s": round(run.tokens_per_s, 2),
    }
