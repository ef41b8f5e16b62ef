"""The grammar that the reply to a request must follow; `models.text.grammars` compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from foredraft.core.checks import checked_list, checked_text, shown
from foredraft.core.errors import ConfigError, unknown

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

_KINDS = ("json_schema", "json_object", "regex", "choice", "lark")
_MAX_CHARACTERS = 1 << 18
_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uri", "uuid", "unknown"),
    }
)
"""Formats of strings that llguidance has a grammar for."""
_MAX_CHOICES = 1024
_MAX_DEPTH = 64
"""Levels of a schema. Deeper ones take minutes to compile, and real data is not that deep."""
MAX_OPTIONAL = 2000
"""Optional properties of one object in a schema. Each takes time at every token of the reply."""


@dataclass(frozen=True)
class Grammar:
    """The form of a reply. Equal grammars are compiled once.

    Attributes:
        kind: how ``source`` is written.
        source: a JSON schema, a regular expression or a Lark grammar as text; for a choice the
            texts as a JSON list; for any JSON object nothing.
        frame: a Lark grammar of the whole reply, in which ``@answer`` is what this grammar
            describes. Empty: that is all of the reply.

    Raises:
        ConfigError: an unknown kind, or a source that is too long, too deep or no text. Whether the
            grammar itself is well formed shows when a request with it is submitted.
    """

    kind: GrammarKind
    source: str = ""
    frame: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise unknown("kind of grammar", str(self.kind), _KINDS)
        checked_text(f"grammar ({self.kind})", self.source)
        checked_text("grammar (frame)", self.frame)
        size = len(self.source) + len(self.frame)
        if size > _MAX_CHARACTERS:
            raise ConfigError(
                f"grammar ({self.kind}) has {size} characters; it may have {_MAX_CHARACTERS}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that a schema accepts; the schema is JSON text or the result of `json.loads`."""
        if isinstance(schema, str):
            schema = _parsed(schema)
        if not isinstance(schema, Mapping | bool):
            raise ConfigError(f"a JSON schema must be an object, not {shown(schema)}")
        _check_schema(schema)
        try:
            return cls("json_schema", json.dumps(known_formats(schema), allow_nan=False))
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

    def behind(self, mark: str) -> Grammar:
        """The same behind free text up to and with a mark, such as ``</think>``."""
        text = json.dumps(mark, ensure_ascii=False)
        start = "start: before /[ \\n]{0,4}/ @answer\n"
        return replace(self, frame=f"{start}before[suffix={text}]: /(?s:.*)/\n")

    @property
    def choices(self) -> list[str]:
        """The texts of a choice."""
        texts: list[str] = json.loads(self.source)
        return texts


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is no JSON: {error}") from error


def _check_schema(schema: object) -> None:
    """Refuse a schema that would take too long, without recursion.

    Raises:
        ConfigError: it is nested too deep, or an object has too many optional properties.
    """
    depth, level = 0, [schema]
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ConfigError(f"the JSON schema is nested deeper than {_MAX_DEPTH}")
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                _check_object(item)
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        level = inner


def _check_object(schema: Mapping[str, Any]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or len(properties) <= MAX_OPTIONAL:
        return
    named = (
        {each for each in required if isinstance(each, str)} if isinstance(required, list) else ()
    )
    num_optional = len(properties.keys() - named)
    if num_optional > MAX_OPTIONAL:
        raise ConfigError(
            f"the JSON schema has an object of {num_optional} optional properties; {MAX_OPTIONAL} "
            "are possible: make properties required, or split the object"
        )


def known_formats(schema: Any) -> Any:
    """A schema without the string formats that no grammar is known for.

    JSON Schema calls a format an annotation: one that is not known binds nothing.
    """
    if isinstance(schema, list | tuple):
        return [known_formats(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in ("const", "enum", "default", "examples") else known_formats(value)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in _FORMATS)
    }
