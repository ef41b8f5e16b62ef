"""`foredraft index …`: datastores of text for the retrieval drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.core.errors import ConfigError
from foredraft.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from foredraft.models.files.progress import Progress
    from foredraft.models.text.tokenizer import Tokenizer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make texts searchable for the retrieval drafter."""


@app.command()
def build(
    files: Annotated[list[Path], typer.Argument(help="Text files, or folders of them.")],
    output: Annotated[Path, typer.Option(help="The folder to write.")],
    model: Annotated[
        str, typer.Option(help="A built-in name, a directory, a GGUF file, or a hub id.")
    ] = DEFAULT_MODEL,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an index that is already there.")
    ] = False,
) -> None:
    """Index text files, each a document, in the ids of a model's tokenizer.

    Use the index with a model of the same tokenizer:

        foredraft index build manual.txt notes/ --output my-index

        foredraft generate "…" --drafter retrieval --drafter-option index=my-index
    """
    from foredraft.cli.display import RichProgress, say
    from foredraft.drafters.text.retrieval import build_index
    from foredraft.models.files.store import resolve_model
    from foredraft.models.text.tokenizer import Tokenizer

    _check_output(output, replace)
    paths = _text_files(files)
    with RichProgress() as progress:
        tokenizer = Tokenizer(resolve_model(model, progress=progress))
        documents = _documents(paths, tokenizer, progress)
        vocab_size = tokenizer.vocab_size
        count = build_index(output, documents, tokenizer.fingerprint, vocab_size, progress)
    files_word = "file" if len(paths) == 1 else "files"
    say(f"{output}: {count} tokens of {len(paths)} {files_word}")


def _check_output(output: Path, replace: bool) -> None:
    from foredraft.drafters.text.retrieval import is_index

    if not output.exists():
        return
    if not is_index(output):
        raise ConfigError(f"{output} is there already and is no index; choose another --output")
    if not replace:
        raise ConfigError(f"{output} is there already; --replace replaces it")


def _text_files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are named; folders stand for all files in them, hidden ones left out."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            found += [p for p in inside if not _is_hidden(p.relative_to(path))]
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(f"no such file or folder: {path}")
    if not found:
        raise ConfigError(f"there are no files in {', '.join(map(str, paths))}")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


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
