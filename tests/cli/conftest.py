"""A tiny checkpoint on disk, and a way to run the command line on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foredraft.cli.main import app
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "tiny"
    save_checkpoint(directory, NATIVE_CONFIGS["llama-tied"]())
    return directory


@pytest.fixture
def run(checkpoint: Path) -> Run:
    """Run a command on the tiny checkpoint in float32."""

    def run(*arguments: str, input: str | None = None) -> Result:
        options = ("--model", str(checkpoint), "--dtype", "float32")
        return CliRunner().invoke(app, [arguments[0], *options, *arguments[1:]], input=input)

    return run
