"""The grammar that command-line options name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar


def one_grammar(
    json_schema: str | None, regex: str | None, choice: Sequence[str] | None
) -> Grammar | None:
    """What the reply has to look like, if anything is said of it.

    Args:
        json_schema: a file.

    Raises:
        ConfigError: more than one is named, or the file cannot be read.
    """
    named = {"--json-schema": json_schema, "--regex": regex, "--choice": choice}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other; give one")
    if json_schema is not None:
        return _of_schema(json_schema)
    if regex is not None:
        return Grammar.regex(regex)
    return None if choice is None else Grammar.choice(choice)


def _of_schema(path: str) -> Grammar:
    try:
        return Grammar.json_schema(Path(path).read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"--json-schema {path}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the JSON schema {path} cannot be read: {error}") from error
