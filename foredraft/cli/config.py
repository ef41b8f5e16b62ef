"""The user's file of settings: ``foredraft/config.toml`` in the folder of configurations.

It has the sections ``[model]`` (fields of `LoadOptions`), ``[sampling]`` (of `SamplingParams`, for
generate and chat) and ``[server]`` (of `ServerSettings`). Options of the command line go before
the environment, the environment before the file. Only the command line reads it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.core.errors import ConfigError, nearest

_SECTIONS = ("model", "sampling", "server")


def path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the file is looked for; None: nowhere.

    ``$FOREDRAFT_CONFIG`` where it is set (empty: no file is read), else
    ``$XDG_CONFIG_HOME/foredraft/config.toml`` or ``~/.config/foredraft/config.toml``.
    """
    if (own := environment.get("FOREDRAFT_CONFIG")) is not None:
        return Path(own).expanduser() if own else None
    shared = environment.get("XDG_CONFIG_HOME")
    folder = Path(shared).expanduser() if shared else Path.home() / ".config"
    return folder / "foredraft" / "config.toml"


def section(name: str) -> dict[str, Any]:
    """A section of the file; empty where there is none.

    Raises:
        ConfigError: the file cannot be read, or has a section that is not known.
    """
    file = path()
    if file is None or not (file.is_file() or "FOREDRAFT_CONFIG" in os.environ):
        return {}
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the settings {file} cannot be read: {error}") from error
    for found in content:
        if found not in _SECTIONS or not isinstance(content[found], dict):
            raise ConfigError(
                f"{file}: there is no section [{found}]{nearest(found, _SECTIONS)} "
                f"(known: {', '.join(_SECTIONS)})"
            )
    return dict(content.get(name, {}))
