"""`foredraft train …`: write text, and train drafters on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.cli.train_compare import compare
from foredraft.core.errors import ConfigError
from foredraft.options import LoadOptions
from foredraft.train.optimiser import Rates
from foredraft.train.plan import TrainPlan

if TYPE_CHECKING:
    from foredraft.cli.training_display import TrainingDisplay
    from foredraft.drafters.heads.store import TargetIdentity
    from foredraft.llm import LLM
    from foredraft.train.texts import Text

app = typer.Typer(no_args_is_help=True)
_WRITTEN_AT_ONCE = 16
Out = Annotated[Path, typer.Option("--out", help="The folder to write, or to go on with.")]
Target = Annotated[
    LoadOptions,
    o.Derived(
        only=("model", "device"),
        names={"model": "--target"},
        fixed={"drafter": "none", "max_batch_size": _WRITTEN_AT_ONCE, "calibrate": False},
    ),
]


@app.callback()
def _group() -> None:
    """Train a drafter for a model of your own."""


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


_TEXT = o.Derived("Text", names={"data": "--data"}, parsers={"text_tokens": parse_count})
_RATES = o.Derived("Training", names={"matrices": "--lr", "tables": "--table-lr"},
                   only=("matrices", "tables"))  # fmt: skip
_PLAN = o.Derived(
    "Training",
    without=("clip", "held_out_texts", "save_s", "survival"),
    parsers={"tokens": parse_count},
)


def _train_command(kind: str) -> Callable[..., None]:
    def command(
        load: Target,
        data: Annotated[DataOptions, _TEXT],
        plan: Annotated[TrainPlan, _PLAN],
        rates: Annotated[Rates, _RATES],
        out: Out,
        start_from: Annotated[
            Path | None,
            typer.Option(help="A trained head of this kind to begin with, instead of nothing."),
        ] = None,
        option: Annotated[
            list[str] | None, typer.Option(help="NAME=VALUE of this kind; may be repeated.")
        ] = None,
    ) -> None:
        options = o.parse_assignments("--option", option or ())
        plan = replace(plan, rates=replace(rates, vectors=rates.tables))
        _train(kind, load, data, plan, out, options, start_from)

    command.__doc__ = f"Train a drafter of kind {kind}. The same command goes on where it was left."
    return o.with_options(command)


_KINDS = (
    *("dspark", "draft_model", "eagle", "early_exit", "hidden_head", "hydra", "medusa", "mtp"),
)

for _kind in _KINDS:
    app.command(_kind)(_train_command(_kind))

app.command()(o.with_options(compare))


@app.command("table")
@o.with_options
def train_table(
    load: Target,
    data: Annotated[DataOptions, _TEXT],
    out: Out,
    min_count: Annotated[
        int,
        typer.Option(help="Times that a context's likeliest successor must have come.", min=1),
    ] = 2,
    megabytes: Annotated[float, typer.Option(help="Of the file, at most.", min=0.01)] = 4.0,
) -> None:
    """Learn a table of what follows what. It takes seconds, and starts anew each time."""
    from foredraft.cli.training_display import TrainingDisplay
    from foredraft.drafters.heads.store import identify
    from foredraft.drafters.table import BOTH
    from foredraft.system.timing_lock import Heed
    from foredraft.train.ngrams import TablePlan
    from foredraft.train.table import train_table
    from foredraft.train.target import TrainingTarget

    llm = o.load_llm(load)
    identity = _identity(llm, identify)
    known = TrainingTarget(llm.target, identity.name, identity.tokenizer)
    with Heed() as pause, TrainingDisplay(Console(stderr=True, highlight=False)) as display:
        texts = _texts(data, out, llm, identity, display, pause)
        if display.wants_stop():
            raise typer.Exit(130)
        made = {"data": [*data.data], "command": _command()}
        measured = train_table(known, texts, out, TablePlan(min_count, megabytes), made)
    right = ", ".join(f"{n} {m[BOTH]:.3f}" for n, m in measured.items())
    said = f"{out}: next tokens named right, with earlier matches: {right}"
    Console(highlight=False).print(said, markup=False, soft_wrap=True)


@app.command("write-text")
@o.with_options
def write_text(
    load: Target,
    out: Out,
    tokens: Annotated[str, typer.Option(help="Of replies, such as 2M; those there count.")],
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
    llm = o.load_llm(replace(load, max_batch_size=batch))
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
    load: LoadOptions,
    data: DataOptions,
    plan: TrainPlan,
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
    llm = o.load_llm(load)
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
            plan,
            display,
            pause,
            cache_root() / "captures",
            data.capture_gb * 1e9,
            {"data": [*data.data], "command": _command()},
            older,
        )
        result = trainer.run()
    done = f"{result.tokens} tokens, {result.seconds / 60:.1f} minutes of learning"
    more = "" if result.done >= 1 else f" ({result.done:.0%}; the same command goes on)"
    Console(highlight=False).print(f"{out}: {done}{more}", markup=False, soft_wrap=True)


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
    for each in data.data:
        path = Path(each)
        if each == "self" or path.suffix == ".jsonl":
            made_up, path = each == "self", out / "training" / f"texts-{path.stem}"
            plan = WritePlan(tokens=data.text_tokens, made_up=made_up, passes=3)
            files = [] if made_up else [each]
            write_into(path, llm, identity, files, plan, display, pause, display.wants_stop)
        check_origin(path, identity)
        found += read_texts(path)
    return found


def _command() -> str:
    import shlex
    import sys

    return shlex.join(["foredraft", *sys.argv[1:]])
