"""`foredraft export`: a trained head in the layout that other engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.core.errors import ConfigError
from foredraft.options import DEFAULT_MODEL

_BUILT_IN_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The built-in model's name on the Hugging Face hub."""


def export(
    head: Annotated[Path, typer.Argument(help="The folder of a trained head.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    format: Annotated[str, typer.Option("--format", help="speculators.")] = "speculators",
    target: Annotated[
        str, typer.Option("--target", help="Whose head it is: as --model elsewhere.")
    ] = DEFAULT_MODEL,
    verifier: Annotated[
        str | None,
        typer.Option(help="The target's name in other engines (its hub id, or --target)."),
    ] = None,
) -> None:
    """Write a trained head for vLLM and SGLang.

    foredraft export heads/eagle --format speculators --out heads/eagle-speculators
    """
    from foredraft.cli.display import RichProgress, say
    from foredraft.drafters.trained import fingerprint_of_files, read_info
    from foredraft.models.files.safety import Checkpoint
    from foredraft.models.files.store import resolve_model
    from foredraft.train.export import export_head

    info = read_info(head)
    with RichProgress() as progress:
        checkpoint = Checkpoint(resolve_model(target, progress=progress))
    if fingerprint_of_files(checkpoint) != info.target.fingerprint:
        raise ConfigError(
            f"the head in {head} was trained for {info.target.name!r}, and --target {target!r} is "
            "another model"
        )
    usual = _BUILT_IN_ID if target == DEFAULT_MODEL else target
    architectures = checkpoint.config.get("architectures") or ["LlamaForCausalLM"]
    export_head(head, out, format, verifier or usual, architectures)
    say(f"{out}: {format}")
