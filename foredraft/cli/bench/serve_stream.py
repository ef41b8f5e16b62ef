"""`foredraft bench serve-stream`: what the way through the server costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.cli.progress import progress_bar


@o.with_option_objects
def serve_stream(
    running: o.ModelOptions,
    draft: o.DraftOptions,
    prompts: o.Prompts = None,
    limit: o.Limit = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, after one to warm up.")] = 5,
    json_file: o.JsonFile = None,
) -> None:
    """Tokens a second of one client through the server, beside the engine's own.

    Two engines on one loaded model take turns at each prompt: one is read in this process, the
    other by a client in another process, through the server.

    Examples:

        foredraft bench serve-stream --drafter none
    """
    from foredraft.bench.prompts import load_prompts
    from foredraft.bench.report import check_outputs, write_json
    from foredraft.bench.serve_clients import SEED, Asked
    from foredraft.bench.streaming import measure_streaming

    check_outputs(json_file)
    texts = [prompt.text for prompt in load_prompts(prompts, limit)]
    asked = Asked(texts, max_tokens, temperature)
    llm = o.load_llm(o.load_options(running, draft))
    with progress_bar(rounds + 1) as advance:
        figure = measure_streaming(llm, asked, rounds, advance)
    Console(highlight=False, soft_wrap=True).print(
        f"the engine {figure.engine_tokens_per_s:.1f} tokens/s, through the server "
        f"{figure.served_tokens_per_s:.1f}: streaming adds {figure.added:.1%} "
        f"({min(figure.rounds):.1%} to {max(figure.rounds):.1%} in {rounds} rounds)"
    )
    if json_file:
        by_round = [{"added": added} for added in figure.rounds]
        figures = {"drafter": llm.drafter_name, **asdict(figure), "rounds": by_round}
        write_json(json_file, figures, SEED)
