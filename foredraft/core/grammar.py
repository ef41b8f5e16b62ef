"""A grammar that a reply has to follow, as a request names it. What reads it is elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foredraft.core.checks import checked_list, checked_text, shown
from foredraft.core.errors import ConfigError, unknown

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

_KINDS = ("json_schema", "json_object", "regex", "choice", "lark")
_MAX_CHARACTERS = 1 << 18
_MAX_CHOICES = 1024
_MAX_DEPTH = 64
"""Of a schema. Deeper ones are no one's data, and compile for minutes."""


@dataclass(frozen=True)
class Grammar:
    """What a reply has to look like. Two equal ones are compiled once.

    Attributes:
        kind: how ``source`` is written.
        source: a JSON schema, a regular expression or a Lark grammar as text; for a choice the
            texts as a JSON list; for any JSON object nothing.

    Raises:
        ConfigError: an unknown kind, or a source that is too long, too deep or no text. Whether the
            grammar itself is well formed shows when a request with it is submitted.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise unknown("kind of grammar", str(self.kind), _KINDS)
        checked_text(f"grammar ({self.kind})", self.source)
        if len(self.source) > _MAX_CHARACTERS:
            raise ConfigError(
                f"grammar ({self.kind}) has {len(self.source)} characters; it may have "
                f"{_MAX_CHARACTERS}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that a schema accepts, given as JSON text or as what `json.loads` makes of it."""
        if isinstance(schema, str):
            schema = _parsed(schema)
        if not isinstance(schema, Mapping | bool):
            raise ConfigError(f"a JSON schema must be an object, not {shown(schema)}")
        try:
            if _depth(schema) > _MAX_DEPTH:
                raise ConfigError(f"the JSON schema is nested deeper than {_MAX_DEPTH}")
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON schema cannot be written as JSON: {error}") from error

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches from its beginning to its end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        checked = checked_list("choice", texts)
        for text in checked:
            if not checked_text("choice", text):
                raise ConfigError("choice holds an empty text")
        if not 0 < len(checked) <= _MAX_CHOICES:
            raise ConfigError(
                f"choice holds {len(checked)} texts; 1 to {_MAX_CHOICES} are possible"
            )
        return cls("choice", json.dumps(checked))

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """Text that a grammar in Lark's syntax derives."""
        return cls("lark", source)

    @property
    def choices(self) -> list[str]:
        """Of a choice, the texts."""
        texts: list[str] = json.loads(self.source)
        return texts


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is no JSON: {error}") from error


def _depth(value: object) -> int:
    """How deep objects and lists are nested, without recursion."""
    depth, level = 0, [value]
    while level and depth <= _MAX_DEPTH:
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        depth, level = depth + 1, inner
    return depth
