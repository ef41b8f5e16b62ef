"""`foredraft demo`: the same three replies, plain and speculative, side by side in time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from foredraft.bench.prompts import BenchPrompt, load_prompts
from foredraft.cli import options as o
from foredraft.cli.display import drafted_by, legend, show_pieces
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions

if TYPE_CHECKING:
    from foredraft.bench.measure import MeasuredRun
    from foredraft.llm import LLM

_SAMPLING = o.sampling(seed=0, max_tokens=160)
_SAMPLING = replace(_SAMPLING, without=(*_SAMPLING.without, "coupling"))  # drawn ones differ
_LOADED = o.model(
    max_batch_size=1,
    prefix_caching=False,  # both sides have to read their prompts
)
_TITLES = {"chat": "open chat", "summarise": "summarise a passage", "edit": "edit a piece of code"}


@o.with_options
def demo(
    load: Annotated[LoadOptions, _LOADED],
    params: Annotated[SamplingParams, _SAMPLING],
) -> None:
    """Generate three replies plainly and speculatively, and show that they are identical.

    The exit status is 1 if any text differs.
    """
    console = Console(highlight=False)
    speculative = o.load_llm(load)
    plainly = replace(load, drafter="none", draft_model=None, drafter_options={})
    plain = speculative.with_drafter(plainly)
    for llm in (plain, speculative):  # the first forward of a process is slower
        llm.generate("Warm up.", SamplingParams(max_tokens=4))
    prompts = load_prompts(None, len(_TITLES))  # one of each category
    pairs = [(prompt, *_compare(console, plain, speculative, prompt, params)) for prompt in prompts]
    _print_table(console, speculative, pairs)
    if any(left.sha256 != right.sha256 for _, left, right in pairs):
        raise typer.Exit(1)


def _compare(
    console: Console, plain: LLM, speculative: LLM, prompt: BenchPrompt, params: SamplingParams
) -> tuple[MeasuredRun, MeasuredRun]:
    from foredraft.bench.measure import measure

    console.print(Rule(f"[bold]{_TITLES[prompt.category]}[/bold]", align="left"))
    console.print(prompt.text, style="dim", markup=False, soft_wrap=True)
    runs = []
    for title, llm in (("plain", plain), ("speculative", speculative)):
        console.print(Rule(title, align="left", style="dim"))
        events = llm.stream_chat([{"role": "user", "content": prompt.text}], params)
        runs.append(measure(events, lambda event: show_pieces(console, event.pieces)))
        console.print()
    return runs[0], runs[1]


def _print_table(
    console: Console, llm: LLM, pairs: list[tuple[BenchPrompt, MeasuredRun, MeasuredRun]]
) -> None:
    console.print(Rule("result", align="left"))
    console.print(legend())
    table = Table("prompt", box=None, padding=(0, 2, 0, 0))
    titles = ("plain tok/s", "speculative tok/s", "speed-up", "committed per step", "drafted by")
    for title in titles:
        table.add_column(title, justify="right")
    for prompt, plain, speculative in pairs:
        table.add_row(
            _TITLES[prompt.category],
            f"{plain.tokens_per_s:.1f}",
            f"{speculative.tokens_per_s:.1f}",
            f"{speculative.tokens_per_s / plain.tokens_per_s:.2f}x" if plain.tokens_per_s else "-",
            f"{speculative.result.stats.committed_per_step:.2f}",
            drafted_by(speculative.result.stats),
        )
    console.print(table)
    if llm.plan is not None:
        plan = llm.plan
        how = f"{plan.name}, {plan.number_format}, {plan.decoder} kernels, {plan.device}"
        console.print(f"({how}; decoding only, after the first token)", style="dim")
    for prompt, plain, speculative in pairs:
        is_same, title = plain.sha256 == speculative.sha256, _TITLES[prompt.category]
        said = f"DIFFERENT: {title}: plain sha256 {plain.sha256}, speculative {speculative.sha256}"
        if is_same:
            said = f"identical: sha256 {plain.sha256} ({title})"
        console.print(said, style="green" if is_same else "bold red", soft_wrap=True)
    console.print("Watch it happen, and see why each word is there: [bold]foredraft serve[/bold]")
