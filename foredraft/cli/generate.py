"""`foredraft generate`: continue a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from foredraft.cli import options as o
from foredraft.cli.display import PromptProgress, legend, reply_display, say, stats_line
from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions

if TYPE_CHECKING:
    from foredraft.bench.measure import MeasuredRun
    from foredraft.engine.request import Event
    from foredraft.llm import LLM

_SAMPLING = replace(o.sampling("stop", "coupling"), section="sampling")


@o.with_options
def generate(
    load: Annotated[LoadOptions, o.model(max_batch_size=1, samples=True)],
    params: Annotated[SamplingParams, _SAMPLING],
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; '-' reads standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a message to a chat model.")
    ] = False,
    prediction: Annotated[
        Path | None,
        typer.Option(
            "--prediction",
            help="A file with text that the reply is expected to repeat.",
            hidden=True,
        ),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="The reply is JSON by the schema in this file.")
    ] = None,
    as_json: o.Json = False,
    trace: o.TraceTo = None,
) -> None:
    """Continue a prompt; accepted draft tokens are underlined.

    The text is what the model alone would write: with the same seed it does not depend on the
    drafter.

    Examples:

        foredraft generate "Once upon a time"

        foredraft generate --chat "Name three rivers." --temperature 0.8 --seed 7

        foredraft generate - --drafter none --json < prompt.txt

        foredraft generate --chat "Describe a baker as JSON." --json-schema person.json

        foredraft generate --chat "Rename total to result: …" --prediction code.py
    """
    if prompt is None:
        raise ConfigError("which text is to be continued? Name it, or '-' for standard input")
    if prediction is not None:
        drafter = load.drafter if load.drafter == "none" else params.speculation
        if drafter not in ("auto", "prediction"):
            raise ConfigError(
                f"--prediction is of no use with drafter {drafter!r}, which ignores it"
            )
        params = replace(params, prediction=_read(prediction, "the prediction"))
    if json_schema is not None:
        try:
            grammar = Grammar.json_schema(_read(json_schema, "the JSON schema"))
        except ConfigError as error:
            raise ConfigError(f"--json-schema {json_schema}: {error}") from error
        params = replace(params, grammar=grammar)
    text = _read_input() if prompt == "-" else prompt
    about = {
        "temperature": params.temperature,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
    }
    with o.tracing(trace, params=about) as load_llm:
        _generate(load_llm(load), text, params, chat=chat, as_json=as_json)


def _generate(llm: LLM, text: str, params: SamplingParams, *, chat: bool, as_json: bool) -> None:
    assert llm.tokenizer is not None
    if chat:
        token_ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
    else:
        token_ids = llm.tokenizer.encode(text)
    events = llm.stream(token_ids, params)
    if as_json:
        from foredraft.bench.measure import measure

        with PromptProgress(len(token_ids)) as progress:
            run = measure(events, progress.show)
        is_unicode = str(sys.stdout.encoding).lower() in ("utf-8", "utf8")
        typer.echo(json.dumps(_report(llm, run, text), ensure_ascii=not is_unicode))
        _fail_if(run.result.error)
    else:
        _show(llm, events, len(token_ids))


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error


def _read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise ConfigError(f"the prompt on standard input is not UTF-8 ({found})") from error
    except OSError as error:
        raise ConfigError(f"the prompt on standard input cannot be read: {error}") from error


def _show(llm: LLM, events: Iterator[Event], num_prompt_tokens: int) -> None:
    from foredraft.bench.measure import measure

    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    with reply_display(llm, console, num_prompt_tokens) as show:
        run = measure(events, show)
    console.print()
    stats, is_stopped = run.result.stats, run.result.finish_reason == "cancelled"
    if stats.accepted and console.is_terminal:
        notes.print(legend())
    line = stats_line(stats, run.tokens_per_s)
    notes.print(Text.assemble(("stopped: ", "dim"), line) if is_stopped else line, soft_wrap=True)
    if is_stopped:
        raise typer.Exit(130)
    _fail_if(run.result.error)


def _fail_if(error: str | None) -> None:
    if error:
        say(f"error: {error}", stderr=True, style="red")
        raise typer.Exit(1)


def _report(llm: LLM, run: MeasuredRun, prompt: str) -> dict[str, Any]:
    result, stats, drafters = run.result, run.result.stats, run.result.stats.drafters
    return {
        "model": llm.plan.name if llm.plan else None,
        "drafter": max(drafters, key=lambda name: drafters[name], default=llm.drafter_name),
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "num_prompt_tokens": result.num_prompt_tokens,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "seed": result.seed,
        "stats": vars(stats) | {"committed_per_step": round(stats.committed_per_step, 4)},
        "first_token_s": round(run.first_event_s, 4),
        "total_s": round(run.total_s, 4),
        "tokens_per_s": round(run.tokens_per_s, 2),
    }
