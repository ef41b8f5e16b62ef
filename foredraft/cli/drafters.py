"""`foredraft drafters`: the drafters, what each needs, its options, and an index of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from foredraft.cli import options as o
from foredraft.cli.display import RichProgress, say, show_facts
from foredraft.core.errors import ConfigError
from foredraft.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from foredraft.drafters.spec import DrafterSpec
    from foredraft.models.files.progress import Progress
    from foredraft.models.text.tokenizer import Tokenizer

_NAME = "NAME"


class _Names(TyperGroup):
    """``index``, and the names of drafters: whatever is no command names one; nothing, all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or [_NAME])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "", self.commands[_NAME], args


app = typer.Typer(
    cls=_Names, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)


@app.callback()
def _group() -> None:
    """List the drafters, show the options of one, or index text for one."""


@app.command(_NAME)
def list_drafters(
    name: Annotated[str | None, typer.Argument(help="Show the options of this one.")] = None,
    as_json: o.Json = False,
) -> None:
    """List the drafters, other packages' included, or show the options of one."""
    from foredraft.bench.report import Report, Table
    from foredraft.drafters import drafter_key, drafter_spec, usable_specs

    key = None if name is None else drafter_key(name)
    specs = usable_specs() if key is None else {key: drafter_spec(key)}
    found = {each: described(each, spec) for each, spec in specs.items()}
    if as_json:
        typer.echo(json.dumps(found))
    elif key is not None:
        _show_one(key, found[key])
    else:
        rows = [
            {"name": each, "summary": said["summary"], "needs": "; ".join(said["needs"])}
            for each, said in found.items()
        ]
        columns = {"drafter": "{name}", "what it does": "{summary}", "what it needs": "{needs}"}
        more = "\nforedraft drafters NAME shows the options of one."
        Report([Table("", rows, columns)], lines=[more]).show()


def described(name: str, spec: DrafterSpec) -> dict[str, Any]:
    """A drafter as plain data."""
    from foredraft.drafters.registry import head_class

    return {
        "summary": spec.summary,
        "needs": needs_of(spec),
        "num_draft_tokens": spec.num_draft_tokens,
        "copies": spec.copies,
        "trainable": None if spec.head is None else list(head_class(name).OPTIONS),
        "options": dict(spec.options),
    }


def needs_of(spec: DrafterSpec) -> list[str]:
    needs = []
    if spec.trained is not None:
        needs.append(f"a trained {spec.trained} (option head), unless one comes with the model")
    if spec.needs_draft_model:
        vocabulary = "of any vocabulary" if spec.draft_model == "any vocabulary" else ""
        needs.append(f"a draft model {vocabulary}".rstrip())
    if spec.needs_in_words:
        needs.append(spec.needs_in_words)
    if spec.reads_prediction:
        needs.append("a prediction of the reply")
    return needs


def _show_one(name: str, said: Mapping[str, Any]) -> None:
    from foredraft.bench.report import Report, Table

    facts = {"drafter": name} | {key: value for key, value in said.items() if key != "options"}
    show_facts(facts)
    if options := said["options"]:
        rows = [{"option": option, "text": text} for option, text in options.items()]
        columns = {"option": "{option}", "what it sets (default)": "{text}"}
        how = f"\n--drafter {name} --drafter-option NAME=VALUE"
        Report([Table("", rows, columns)], lines=[how]).show()


@app.command("index")
def build_retrieval_index(
    files: Annotated[list[Path], typer.Argument(help="Text files, or folders of them.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    model: Annotated[
        str, typer.Option(help="A built-in name, a directory, a GGUF file, or a hub id.")
    ] = DEFAULT_MODEL,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an index that is already there.")
    ] = False,
) -> None:
    """Index text files, each a document, in the ids of a model's tokenizer.

    Use the index with a model of the same tokenizer:

        foredraft drafters index manual.txt notes/ --output my-index

        foredraft generate "…" --drafter retrieval --drafter-option index=my-index
    """
    from foredraft.drafters.text.retrieval import build_index
    from foredraft.models.files.store import resolve_model
    from foredraft.models.text.tokenizer import Tokenizer

    if output.is_dir() or (output.exists() and not replace):
        raise ConfigError(f"{output} is there already; --replace replaces a file")
    paths = _text_files(files)
    with RichProgress() as progress:
        tokenizer = Tokenizer(resolve_model(model, progress=progress))
        documents = _documents(paths, tokenizer, progress)
        vocab_size = tokenizer.vocab_size
        count = build_index(output, documents, tokenizer.fingerprint, vocab_size, progress)
    files_word = "file" if len(paths) == 1 else "files"
    say(f"{output}: {count} tokens of {len(paths)} {files_word}")


def _text_files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are named; folders stand for all files in them, hidden ones left out."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            for inside in sorted(path.rglob("*")):
                parts = inside.relative_to(path).parts
                if inside.is_file() and not any(part.startswith(".") for part in parts):
                    found.append(inside)
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(f"no such file or folder: {path}")
    if not found:
        raise ConfigError(f"there are no files in {', '.join(map(str, paths))}")
    return found


def _documents(
    paths: Sequence[Path], tokenizer: Tokenizer, progress: Progress
) -> Iterator[list[int]]:
    progress.stage("Reading text")
    for number, path in enumerate(paths):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text ({error})") from error
        yield tokenizer.encode(text, add_special_tokens=False)
        progress.advance((number + 1) / len(paths))
