"""`foredraft tune load`: what the controller would choose under each load, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli import lists
from foredraft.cli import options as o
from foredraft.cli.progress import progress_bar
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.control.planner import Plan
    from foredraft.llm import LLM
    from foredraft.options import LoadOptions


@dataclass(frozen=True)
class LoadChoice:
    """What it has come to after some replies under one load.

    Attributes:
        load: requests at once.
        drafter: that drafts; None: plain decoding.
        rows: how many of the requests draft.
        budget: nodes of each of them, on average.
        committed_per_step: tokens of one row that are expected of the last plan.
        plain_ms: a step without drafts.
        node_ms: what a node adds, on average of those that are planned for.
        gain: expected throughput over plain decoding's.
        saved: of the time that the replies would have taken without drafts; negative: lost.
        why: in words.
    """

    load: int
    drafter: str | None
    rows: int
    budget: float
    committed_per_step: float
    plain_ms: float
    node_ms: float
    gain: float
    saved: float
    why: str


@o.with_option_objects
def tune_load(
    running: o.ModelOptions,
    concurrency: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,2,4,8,16",
    prompts: o.Prompts = None,
    drafter: o.Drafter = "auto",
    draft_model: o.DraftModel = None,
    temperature: o.Temperature = 0.0,
    tokens: Annotated[int, typer.Option(min=8, help="Of each reply.")] = 64,
    as_json: o.Json = False,
) -> None:
    """How much is drafted under each load, by whom, and why: as the controller comes to see it.

    It writes some replies under each load and shows the last plan for a full batch.

    Examples:

        foredraft tune load --concurrency 1,4,16

        foredraft tune load --prompts my-prompts.jsonl --temperature 0.8 --json
    """

    loads = lists.counts("--concurrency", concurrency)
    asked = o.load_options(
        running, drafter=drafter, draft_model=draft_model, max_batch_size=max(loads)
    )
    if drafter == "none":
        raise ConfigError("drafter 'none' leaves nothing to choose; name another or leave it out")
    llm = o.load_llm(asked)
    with progress_bar(len(loads)) as advance:
        found = []
        for load in loads:
            found.append(_choice(llm, asked, prompts, load, temperature, tokens))
            advance(f"{load} at once")
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
    else:
        _show(Console(highlight=False), found)


def _choice(
    llm: LLM, asked: LoadOptions, prompts: str | None, load: int, temperature: float, tokens: int
) -> LoadChoice:
    from foredraft.bench.serving import Load, OurContender
    from foredraft.cli.bench.serve_sim import prompt_ids
    from foredraft.control.adaptive import AdaptiveBudget
    from foredraft.core.params import SamplingParams

    options = replace(asked, max_batch_size=load)
    params = SamplingParams.of(max_tokens=tokens, temperature=temperature, seed=0, ignore_eos=True)
    server = OurContender("auto", lambda rows, trace: llm.with_drafter(options, trace=trace))
    server.begin(Load(prompt_ids(llm, prompts, 2 * load, tokens), params, load))
    controller, plan = server.llm.controller, None
    assert isinstance(controller, AdaptiveBudget)
    while server.turn(1e-9):  # a step
        step = server.served.steps[-1]
        if step.is_decoding and step.num_rows == load:
            plan = controller.plan
    if plan is None:
        raise ConfigError(f"replies of {tokens} tokens are too short for {load} at once")
    return _described(plan, load, float(controller.report()["saved"]))


def _described(plan: Plan, load: int, saved: float) -> LoadChoice:
    pooled = plan.pooled
    drafting = len(plan.budgets)
    node_ms = (plan.price.ms(1) - plan.price.ms(0)) * (1.0 if load == 1 else plan.plain_ms / load)
    gain = pooled.rate / plan.plain_rate if pooled else 1.0
    accepted = pooled.accepted / load if pooled else 0.0
    token_ms = 1.0 / plan.plain_rate
    if plan.is_trial:
        why = "nothing was expected to pay; trying again with a few rows"
    elif plan.drafter is None:
        why = f"nothing pays: a plain token takes {token_ms:.2f} ms"
    else:
        assert pooled is not None
        likely = pooled.accepted / max(pooled.nodes, 1e-9)
        why = (
            f"{likely:.0%} of its nodes are accepted at {node_ms:.2f} ms each; a plain token "
            f"takes {token_ms:.2f} ms"
        )
    return LoadChoice(
        load,
        plan.drafter,
        drafting,
        sum(plan.budgets.values()) / drafting if drafting else 0.0,
        1.0 + accepted,
        plan.plain_ms,
        node_ms if plan.drafter else 0.0,
        gain,
        saved,
        why,
    )


def _show(console: Console, choices: list[LoadChoice]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("at once", "drafter", "rows", "budget", "committed", "plain ms", "node ms",
                  "gain", "saved", "why"):  # fmt: skip
        table.add_column(title, justify="left" if title in ("drafter", "why") else "right")
    for each in choices:
        table.add_row(
            str(each.load),
            each.drafter or "none",
            str(each.rows),
            f"{each.budget:.1f}",
            f"{each.committed_per_step:.2f}",
            f"{each.plain_ms:.1f}",
            f"{each.node_ms:.2f}",
            f"{each.gain:.2f}x",
            f"{each.saved:+.1%}",
            each.why,
        )
    console.print(table)
