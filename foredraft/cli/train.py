"""`foredraft train …`: write text, and train drafters on it."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from foredraft.cli import options as o
from foredraft.cli.display import say
from foredraft.options import LoadOptions
from foredraft.train.options import Rates, TableOptions, TrainOptions, WriteOptions

if TYPE_CHECKING:
    from foredraft.cli.training_display import TrainingDisplay
    from foredraft.llm import LLM
    from foredraft.train.target import TrainingTarget
    from foredraft.train.texts import Text
    from foredraft.train.writing import Writer

_KIND = "KIND"
_WRITTEN_AT_ONCE = 16
_WRITING_SHARE = 0.5
"""Largest share of a training's minutes that is spent on generating its text."""
_LEAST_TOKENS = 1000
"""Replies that are generated even if the minutes are few."""
_DRAWN_LENGTH = 160
"""Tokens of a reply that a copy is rounded for."""
_AGREES_ANYWAY = 0.96
"""Share of tokens from which a better rounding gains nothing."""


class _Kinds(TyperGroup):
    """Commands, and the kinds of heads: whatever is no command names a kind."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            return "", self.commands[_KIND], args
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Kinds, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Train a drafter for a model of your own."""


@dataclass(frozen=True)
class DataOptions:
    """The text to learn from.

    Attributes:
        data: folder of write-text, prompts.jsonl to answer, or self (as if left out); may be
            repeated.
        text_tokens: to write for each file of prompts, and for self, such as 2M.
        capture_gb: most gigabytes of the target's states to keep on disk.
    """

    data: Sequence[str] = ("self",)
    text_tokens: int = 1_000_000
    capture_gb: float = 8.0


Out = Annotated[Path, typer.Option("--out", help="The folder to write, or to resume.")]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Begin anew in --out; the old folder is kept as OUT.old-1."),
]
Target = Annotated[
    LoadOptions,
    o.Derived(
        without=("drafter_options", "draft_model", "num_draft_tokens", "sampling_defaults"),
        names={"model": "--target"},
        fixed={"drafter": "none", "max_batch_size": _WRITTEN_AT_ONCE, "calibrate": False},
        flags=("model", "device"),
    ),
]
_TEXT = o.Derived(
    "Text",
    parsers={"text_tokens": o.parse_count},
    flags=("data", "text_tokens"),
    shown=("data",),
)
_RATES = o.Derived(
    "Training",
    names={"matrices": "--lr"},
    without=("vectors",),
    flags=("matrices",),
    shown=(),
)
_TRAINING = o.Derived(
    "Training",
    without=("clip", "held_out_texts", "save_s"),
    parsers={"tokens": o.parse_count},
    flags=("tokens", "minutes", "batch_tokens", "sequence", "depth", "loss", "evaluations"),
    shown=("tokens", "minutes", "depth"),
)
_WRITING = o.Derived(
    "Text",
    without=("passes", "shard", "max_prompt_tokens"),
    names={"temperatures": "--temperature"},
    flags=("tokens", "temperatures", "max_tokens"),
    shown=("tokens", "temperatures", "max_tokens"),
    parsers={
        "tokens": o.parse_count,
        "temperatures": lambda text: tuple(o.numbers("--temperature", text, float)),
    },
)


# ---------------------------------------------------------------------------------- commands


@app.command(_KIND)
@o.with_options
def train_head(
    kind: Annotated[str, typer.Argument(help="Kind of head; `foredraft drafters` lists them.")],
    load: Target,
    data: Annotated[DataOptions, _TEXT],
    options: Annotated[TrainOptions, _TRAINING],
    rates: Annotated[Rates, _RATES],
    out: Out,
    start_from: Annotated[
        Path | None,
        typer.Option(help="A trained head of this kind to begin with, instead of nothing."),
    ] = None,
    replace_old: Replace = False,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of this kind; may be repeated.")
    ] = None,
) -> None:
    """Train a head of any kind, such as eagle. The same command resumes an interrupted run.

    foredraft train eagle --target smollm2-135m-instruct --minutes 60 --out heads/eagle
    """
    from foredraft.drafters.registry import head_class
    from foredraft.system.paths import cache_root
    from foredraft.train.folder import alone_in, check_out, read_counters
    from foredraft.train.loop import Job, Trainer
    from foredraft.train.options import checked_options

    began = time.monotonic()
    module = head_class(kind)
    kind_options = checked_options(module, o.parse_assignments("--option", option or ()))
    options = replace(options, rates=replace(rates, vectors=rates.tables))
    with alone_in(out):
        if replace_old:
            _move_aside(out)
        check_out(out, module.kind, start_from)
        ends_at = None
        if options.minutes is not None:
            ends_at = began + 60 * options.minutes - read_counters(out).total_s
        with _loaded_target(load, ends_at) as (llm, target, display):
            now = time.monotonic()
            share = None if ends_at is None else now + _WRITING_SHARE * (ends_at - now)
            texts = _read_texts(data, out, llm, target, display, share)
            _check_stop(display, out)
            job = Job(
                module,
                out,
                cache_root() / "captures",
                data.capture_gb * 1e9,
                kind_options,
                start_from,
                {"data": [*data.data], "command": _command()},
            )
            spent_s = time.monotonic() - began
            result = Trainer(job, target, texts, options, display, spent_s).run()
    learnt = f"{result.tokens} tokens, {result.seconds / 60:.1f} minutes of learning"
    more = "" if result.done >= 1 else f" ({result.done:.0%}; the same command goes on)"
    say(f"{out}: {learnt}{more}")


@app.command("table")
@o.with_options
def train_table(
    load: Target,
    data: Annotated[DataOptions, _TEXT],
    options: Annotated[TableOptions, o.Derived("Training")],
    out: Out,
    replace_old: Replace = False,
) -> None:
    """Learn a table of what follows what. It takes seconds; a better table is never replaced."""
    from foredraft.drafters.text.table import BOTH
    from foredraft.train.folder import alone_in
    from foredraft.train.table import kept_table, train_table

    with alone_in(out):
        if replace_old:
            _move_aside(out)
        with _loaded_target(load) as (llm, target, display):
            kept_table(target, out)  # before text is written, see that the folder may be
            texts = _read_texts(data, out, llm, target, display)
            _check_stop(display, out)
            made = {"data": [*data.data], "command": _command()}
            measured = train_table(target, texts, out, options, made, display)
    right = ", ".join(f"{name} {part[BOTH]:.3f}" for name, part in measured.items())
    say(f"{out}: next tokens named right, with earlier matches: {right}")


@app.command("write-text")
@o.with_options
def write_text(
    load: Target,
    options: Annotated[WriteOptions, _WRITING],
    out: Out,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="JSON lines with category and turns; without any, it makes them up."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Replies at the same time.", min=1)] = _WRITTEN_AT_ONCE,
) -> None:
    """Let a model write text to train its drafter on. The same command resumes an interrupted run.

    foredraft train write-text --out my-texts --tokens 1M
    """
    from foredraft.train.folder import alone_in

    options = replace(options, shard=max(_WRITTEN_AT_ONCE * 4, 2 * batch))
    load = replace(load, max_batch_size=batch)
    with alone_in(out), _loaded_target(load) as (llm, target, display):
        writer = _write_into(out, llm, target, prompts or [], options, display)
    skipped = ""
    if writer.num_skipped:
        skipped = (
            f"; {writer.num_skipped} prompts were passed over: they are longer than "
            f"{writer.prompt_limit} tokens"
        )
    more = "" if writer.tokens >= options.tokens else " (the same command goes on)"
    say(f"{out}: {writer.tokens} tokens{more}{skipped}")


@app.command()
def export(
    head: Annotated[Path, typer.Argument(help="The folder of a trained head of kind eagle.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
) -> None:
    """Write an EAGLE head for vLLM and SGLang, in the layout of speculators."""
    from foredraft.train.export import export_head

    export_head(head, out)
    say(f"{out}: an EAGLE-3 head as vLLM loads it")


@app.command("self-draft")
@o.with_options
def tune_self_draft(
    load: Annotated[
        LoadOptions,
        o.model(
            flags=("model", "threads", "dtype"),
            drafter="none",
            draft_model=None,
            drafter_options={},
            max_batch_size=16,
        ),
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

        foredraft train self-draft --model path/to/model
    """
    from foredraft.bench.report import Report, Table

    figures = _tuned_copies(o.load_llm(load), tokens)
    best = max(figures, key=lambda figure: figure["speedup"])
    columns = {"copy": "{name}", "agrees at T=0": "{greedy:.1%}", "at T=1": "{sampled:.1%}",
               "time of a token": "{share:.2f} plain", "memory": "{megabytes:.0f} MB",
               "speed-up, roughly": "{speedup:.2f}x"}  # fmt: skip
    advice = f"auto takes the one with {best['bits']} bits, where it pays; so does self-draft."
    if len({figure["bits"] for figure in figures}) == len(figures):
        advice = (
            "4 bits agree so often that no other rounding can gain: nothing was made. " + advice
        )
    report = Report([Table("copies", figures, columns)], {"best": best}, [advice])
    report.give(as_json=as_json)


def _tuned_copies(llm: LLM, tokens: int) -> list[dict[str, Any]]:
    from foredraft.cli.display import progress_bar
    from foredraft.drafters.model.self_draft import copy_figures, low_bit_target
    from foredraft.models.base import offered

    target = low_bit_target(llm.target)
    figures = copy_figures(target, llm.tokenizer, "as it comes")
    if figures[0]["greedy"] >= _AGREES_ANYWAY:
        return figures
    texts = _drawn_texts(llm, tokens)
    with progress_bar(offered(llm.target.capabilities.first_layers).num_layers) as advance:
        target.tune_copy(texts, advance)
    return [*copy_figures(target, llm.tokenizer, "rounded for its text")[:1], *figures]


def _drawn_texts(llm: LLM, tokens: int) -> list[list[int]]:
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


# -------------------------------------------------------------------------------- the target


@contextmanager
def _loaded_target(
    load: LoadOptions, ends_at: float | None = None
) -> Iterator[tuple[LLM, TrainingTarget, TrainingDisplay]]:
    """A loaded model, as training sees it, and a display.

    Args:
        ends_at: when the whole run is to be over.
    """
    from foredraft.cli.training_display import TrainingDisplay
    from foredraft.models.files.digest import weights_digest
    from foredraft.system.timing_lock import Heed
    from foredraft.train.target import TrainingTarget

    llm = o.load_llm(load)
    assert llm.plan is not None
    assert llm.plan.checkpoint is not None
    assert llm.tokenizer is not None
    console = Console(stderr=True, highlight=False)
    with Heed() as heed, TrainingDisplay(console, heed, ends_at) as display:
        weights = weights_digest(llm.plan.checkpoint, display)
        words = llm.tokenizer.fingerprint
        yield llm, TrainingTarget(llm.target, llm.plan.name, weights, words), display


def _move_aside(out: Path) -> None:
    from foredraft.train.folder import move_aside

    if (aside := move_aside(out)) is not None:
        say(f"{out}: the old folder is kept as {aside}")


def _check_stop(display: TrainingDisplay, out: Path) -> None:
    if display.wants_stop():
        display.say(f"{out}: stopped; the same command goes on")
        raise typer.Exit(130)


def _command() -> str:
    return shlex.join(["foredraft", *sys.argv[1:]])


# ----------------------------------------------------------------------------------- its text


def _read_texts(
    data: DataOptions,
    out: Path,
    llm: LLM,
    target: TrainingTarget,
    display: TrainingDisplay,
    ends_at: float | None = None,
) -> list[Text]:
    """The existing texts, and those that the target writes first.

    Args:
        ends_at: when no more is to be written, if there is enough to begin with.
    """
    from foredraft.train.folder import training_folder
    from foredraft.train.texts import read_texts
    from foredraft.train.writing import check_origin

    texts: list[Text] = []
    for each in data.data:
        path = Path(each)
        if each == "self" or path.suffix == ".jsonl":
            files = [] if each == "self" else [each]
            path = training_folder(out) / f"texts-{path.stem}"
            options = WriteOptions(tokens=data.text_tokens, passes=3)
            _write_into(path, llm, target, files, options, display, ends_at)
            if display.wants_stop():
                return texts
        check_origin(path, target.identity)
        texts += read_texts(path)
    return texts


def _write_into(
    directory: Path,
    llm: LLM,
    target: TrainingTarget,
    files: Sequence[str],
    options: WriteOptions,
    display: TrainingDisplay,
    ends_at: float | None = None,
) -> Writer:
    """Let a model write text into a folder, from where it was left."""
    from foredraft.bench.prompts import load_prompts
    from foredraft.train.writing import PromptEncoder, SourcePrompt, Writer, engine_replies

    def should_end() -> bool:
        is_late = ends_at is not None and time.monotonic() > ends_at
        return display.wants_stop() or (is_late and writer.tokens >= _LEAST_TOKENS)

    assert llm.tokenizer is not None
    prompts = [SourcePrompt(p.id, p.text) for file in files for p in load_prompts(file)]
    write = partial(engine_replies, llm, display.pause, should_end)
    encoder, context = PromptEncoder(llm.tokenizer), target.max_context
    writer = Writer(directory, write, encoder, target.identity, context, prompts, options)
    writer.run(display, should_end)
    return writer
