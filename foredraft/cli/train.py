"""`foredraft train …`: write text, and train drafters on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.cli.train_compare import compare
from foredraft.core.errors import ConfigError
from foredraft.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from foredraft.cli.training_display import TrainingDisplay
    from foredraft.drafters.heads.store import TargetIdentity
    from foredraft.llm import LLM
    from foredraft.train.texts import Text

app = typer.Typer(no_args_is_help=True, help="Train a drafter for a model of your own.")
_DATA, _HOW = "Text", "Training"
_WRITTEN_AT_ONCE = 16


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


Target = Annotated[str, typer.Option("--target", help="Whose drafter: as --model elsewhere.")]
Out = Annotated[Path, typer.Option("--out", help="The folder to write, or to go on with.")]


@app.callback()
def _group() -> None:
    """Train a drafter for a model of your own."""


@dataclass(frozen=True)
class DataOptions:
    """Which text."""

    data: Annotated[
        list[str] | None,
        _option(_DATA, "Folder of write-text, prompts.jsonl to answer, or self (as if left out)."),
    ] = None
    text_tokens: Annotated[
        str, _option(_DATA, "To write for each file of prompts, and for self, such as 2M.")
    ] = "1M"
    capture_gb: Annotated[
        float, _option(_DATA, "Most gigabytes of the target's states to keep on disk.", min=0.0)
    ] = 8.0


@dataclass(frozen=True)
class PlanOptions:
    """How to train; see `foredraft.train.plan.TrainPlan`."""

    tokens: Annotated[
        str | None, _option(_HOW, "To learn from, repetitions counted, such as 20M.")
    ] = None
    minutes: Annotated[
        float | None, _option(_HOW, "Of learning, over all resumptions.", min=0.0)
    ] = None
    loss: Annotated[str, _option(_HOW, "soft, hard, nla, tv or lk.")] = "lk"
    renormalise: Annotated[
        bool, typer.Option("--renormalise", rich_help_panel=_HOW,
                           help="Learn the target's distribution over the output rows alone.")
    ] = False  # fmt: skip
    lr: Annotated[float | None, _option(_HOW, "Highest rate of hidden matrices (Muon).")] = None
    table_lr: Annotated[float | None, _option(_HOW, "Of output rows and vectors (AdamW).")] = None
    batch_tokens: Annotated[int, _option(_HOW, "Tokens of one step.", min=16)] = 1024
    sequence: Annotated[int, _option(_HOW, "Tokens of a row.", min=16)] = 512
    depth: Annotated[int, _option(_HOW, "Draft tokens trained and measured.", min=1, max=16)] = 3
    first_depth_until: Annotated[
        float, _option(_HOW, "Share of it that learns the first token only.", min=0.0, max=1.0)
    ] = 0.4
    output_rows: Annotated[
        int, _option(_HOW, "Tokens that the head can name, the most frequent; 0: all.", min=0)
    ] = 8192
    average: Annotated[
        float, _option(_HOW, "Decay of a mean of the weights; 0: none.", min=0.0, max=0.99999)
    ] = 0.998
    evaluations: Annotated[int, _option(_HOW, "How often acceptance is measured.", min=1)] = 20
    seed: Annotated[int, _option(_HOW, "Of the order of the texts.")] = 0
    float32: Annotated[
        bool, typer.Option("--float32", rich_help_panel=_HOW, help="No bfloat16 products.")
    ] = False


def _train_command(kind: str) -> Callable[..., None]:
    @o.with_option_objects
    def command(
        data: DataOptions,
        plan: PlanOptions,
        out: Out,
        target: Target = DEFAULT_MODEL,
        device: o.Device = "auto",
        start_from: Annotated[
            Path | None,
            typer.Option(help="A trained head of this kind to begin with, instead of nothing."),
        ] = None,
        option: Annotated[
            list[str] | None, typer.Option(help="NAME=VALUE of this kind; may be repeated.")
        ] = None,
    ) -> None:
        """Train a head; the same command goes on where it was left."""
        options = o.parse_drafter_options(option or ())
        _train(kind, target, device, data, plan, out, options, start_from)

    command.__doc__ = f"Train a drafter of kind {kind}. The same command goes on where it was left."
    return command


_KINDS = (
    *("dspark", "draft_model", "eagle", "early_exit", "hidden_head", "hydra", "medusa", "mtp"),
)

for _kind in _KINDS:
    app.command(_kind)(_train_command(_kind))

app.command()(o.with_option_objects(compare))


@app.command("table")
@o.with_option_objects
def train_table(
    data: DataOptions,
    out: Out,
    target: Target = DEFAULT_MODEL,
    device: o.Device = "auto",
    min_count: Annotated[
        int, _option(_HOW, "Times that a context's likeliest successor must have come.", min=1)
    ] = 2,
    megabytes: Annotated[float, _option(_HOW, "Of the file, at most.", min=0.01)] = 4.0,
) -> None:
    """Learn a table of what follows what. It takes seconds, and starts anew each time."""
    from foredraft.cli.training_display import TrainingDisplay
    from foredraft.drafters.heads.store import identify
    from foredraft.drafters.table import BOTH
    from foredraft.system.timing_lock import Heed
    from foredraft.train.ngrams import TablePlan
    from foredraft.train.table import train_table
    from foredraft.train.target import TrainingTarget

    llm = _load(target, device, _WRITTEN_AT_ONCE)
    identity = _identity(llm, identify)
    known = TrainingTarget(llm.target, identity.name, identity.tokenizer)
    with Heed() as pause, TrainingDisplay(Console(stderr=True, highlight=False)) as display:
        texts = _texts(data, out, llm, identity, display, pause)
        if display.wants_stop():
            raise typer.Exit(130)
        made = {"data": data.data or ["self"], "command": _command()}
        measured = train_table(known, texts, out, TablePlan(min_count, megabytes), made)
    right = ", ".join(f"{n} {m[BOTH]:.3f}" for n, m in measured.items())
    said = f"{out}: next tokens named right, with earlier matches: {right}"
    Console(highlight=False).print(said, markup=False, soft_wrap=True)


@app.command("write-text")
def write_text(
    out: Out,
    tokens: Annotated[str, typer.Option(help="Of replies, such as 2M; those there count.")],
    target: Target = DEFAULT_MODEL,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="JSON lines with id, category and turns; without any, it makes them up."),
    ] = None,
    made_up: Annotated[
        bool, typer.Option("--made-up", help="Prompts of its own as well, beside --prompts.")
    ] = False,
    temperature: Annotated[str, typer.Option(help="Taken in turns, with commas.")] = "0,0.7,1",
    max_tokens: Annotated[int, typer.Option(help="Of a reply.", min=1)] = 256,
    batch: Annotated[int, typer.Option(help="Replies at the same time.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    device: o.Device = "auto",
) -> None:
    """Let a model write text to train its drafter on. The same command goes on where it was left.

    foredraft train write-text --out my-texts --tokens 1M
    """
    from foredraft.cli.training_display import TrainingDisplay
    from foredraft.cli.writing import write_into
    from foredraft.drafters.heads.store import identify
    from foredraft.system.timing_lock import Heed
    from foredraft.train.writing import WritePlan

    plan = WritePlan(
        tokens=parse_count(tokens),
        temperatures=_temperatures(temperature),
        max_tokens=max_tokens,
        seed=seed,
        made_up=made_up or not prompts,
        shard=max(_WRITTEN_AT_ONCE * 4, 2 * batch),
    )
    llm = _load(target, device, batch)
    identity = _identity(llm, identify)
    with Heed() as pause, TrainingDisplay(Console(stderr=True, highlight=False)) as display:
        files = prompts or []
        there = write_into(out, llm, identity, files, plan, display, pause, display.wants_stop)
    Console(highlight=False).print(f"{out}: {there} tokens", markup=False, soft_wrap=True)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--temperature {text!r} is not numbers with commas") from None


def _train(
    kind: str,
    target: str,
    device: str,
    data: DataOptions,
    plan: PlanOptions,
    out: Path,
    options: dict[str, Any],
    start_from: Path | None,
) -> None:
    from foredraft.cli.training_display import TrainingDisplay
    from foredraft.drafters.heads.store import identify, load_head
    from foredraft.drafters.registry import head_class
    from foredraft.system.paths import cache_root
    from foredraft.system.timing_lock import Heed
    from foredraft.train.kinds import checked_options
    from foredraft.train.loop import Trainer
    from foredraft.train.memory import settled
    from foredraft.train.target import TrainingTarget

    module = head_class(kind)
    options = checked_options(module, options)
    train_plan = _plan(plan)
    llm = _load(target, device, _WRITTEN_AT_ONCE)
    identity = _identity(llm, identify)
    assert llm.tokenizer is not None
    known = TrainingTarget(llm.target, identity.name, identity.tokenizer)
    older = None if start_from is None else load_head(start_from, module, identity)
    console = Console(stderr=True, highlight=False)
    with settled(), Heed() as pause, TrainingDisplay(console) as display:
        texts = _texts(data, out, llm, identity, display, pause)
        if display.wants_stop():
            raise typer.Exit(130)
        trainer = Trainer(
            module,
            options,
            known,
            texts,
            out,
            train_plan,
            display,
            pause,
            cache_root() / "captures",
            data.capture_gb * 1e9,
            {"data": data.data or ["self"], "command": _command()},
            older,
        )
        result = trainer.run()
    done = f"{result.tokens} tokens, {result.seconds / 60:.1f} minutes of learning"
    more = "" if result.done >= 1 else f" ({result.done:.0%}; the same command goes on)"
    Console(highlight=False).print(f"{out}: {done}{more}", markup=False, soft_wrap=True)


def _plan(given: PlanOptions) -> Any:
    from foredraft.train.optimiser import Rates
    from foredraft.train.plan import TrainPlan

    fields = dict(vars(given))
    lr, table_lr = fields.pop("lr"), fields.pop("table_lr")
    usual = Rates()
    tables = table_lr or usual.tables
    tokens = None if given.tokens is None else parse_count(given.tokens)
    rates = Rates(lr or usual.matrices, tables, tables)
    return TrainPlan(**fields | {"tokens": tokens, "rates": rates})


def parse_count(text: str) -> int:
    """``20M`` and the like.

    Raises:
        ConfigError: it is no number.
    """
    factors = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
    number, factor = text.lower(), 1
    if number[-1:] in factors:
        number, factor = number[:-1], factors[number[-1]]
    try:
        return int(float(number) * factor)
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is no number of tokens; write 500k or 20M") from None


def _load(target: str, device: str, batch: int) -> LLM:
    from foredraft.options import LoadOptions

    options = LoadOptions(
        model=target, device=device, drafter="none", max_batch_size=batch, calibrate=False
    )
    return o.load_llm(options)


def _identity(llm: LLM, identify: Callable[..., TargetIdentity]) -> TargetIdentity:
    assert llm.plan is not None
    assert llm.tokenizer is not None
    return identify(llm.target, llm.plan.name, llm.tokenizer.fingerprint)


def _texts(
    data: DataOptions,
    out: Path,
    llm: LLM,
    identity: TargetIdentity,
    display: TrainingDisplay,
    pause: Callable[[], object],
) -> list[Text]:
    """What is there, and what the target writes first."""
    from foredraft.cli.writing import write_into
    from foredraft.train.texts import read_texts
    from foredraft.train.writing import WritePlan, check_origin

    found: list[Text] = []
    for each in data.data or ["self"]:
        path = Path(each)
        if each == "self" or path.suffix == ".jsonl":
            made_up, path = each == "self", out / "training" / f"texts-{path.stem}"
            plan = WritePlan(tokens=parse_count(data.text_tokens), made_up=made_up, passes=3)
            files = [] if made_up else [each]
            write_into(path, llm, identity, files, plan, display, pause, display.wants_stop)
        check_origin(path, identity)
        found += read_texts(path)
    return found


def _command() -> str:
    import shlex
    import sys

    return shlex.join(["foredraft", *sys.argv[1:]])
