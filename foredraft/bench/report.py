"""Where a figure came from, and files that keep both."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foredraft.core.errors import ConfigError
from foredraft.kernels.instructions import SWITCH
from foredraft.system.machine import describe_machine


def provenance(seed: int) -> dict[str, Any]:
    """Command, revision, versions, machine, threads, seed and time."""
    return {
        "command": _command(),
        "revision": _revision(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "machine": describe_machine(),
    }


def _command() -> str:
    """What was typed, and the switch of our kernels where it was set."""
    switched = [f"{SWITCH}={os.environ[SWITCH]}"] if os.environ.get(SWITCH) else []
    return shlex.join([*switched, "foredraft", *sys.argv[1:]])


def _revision() -> str | None:
    """The git revision of this source tree, marked when it has changes; None outside of one."""
    root = Path(__file__).parents[2]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def check_outputs(json_file: str | None, plot: str | None = None) -> None:
    """Find out before a long measurement whether its results can be kept.

    Raises:
        ConfigError: a file's folder is not there, or matplotlib is not installed for a plot.
    """
    for path in filter(None, (json_file, plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")
    if plot:
        from foredraft.bench.plots import pyplot

        pyplot()


def write_json(path: str, figures: dict[str, Any], seed: int) -> None:
    """Write figures and their provenance.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(provenance(seed) | figures, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
