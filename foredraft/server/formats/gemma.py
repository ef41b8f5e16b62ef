"""Calls as ``call:name{key:value}``, with marks around texts: Gemma 4, FunctionGemma."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from foredraft.server.formats.base import (
    Format,
    Spell,
    Tool,
    call_parts,
    choices_of,
    is_text,
    literal,
    name_of,
    parameters_of,
    schema_rule,
)
from foredraft.server.formats.reading import Incoming, Reads

_HEAD = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
_WORD = re.compile(r"[^,}\]]*")


class Gemma4(Format):
    """See `Format`. A call is passed on when it is whole."""

    name = "gemma4"
    shows = ("<|tool_call>",)
    begins = ("<|tool_call>",)
    between = ""
    think, end_think, stops_thinking = "<|channel>thought\n", "<channel|>", "<channel|>"
    end_call: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'

    def marks(self) -> tuple[str, ...]:
        return (*self.begins, self.end_call, self.quote, "<|channel>", self.end_think)

    def calls(self, text: Incoming, mark: str, tools: Sequence[Tool]) -> Reads[bool]:
        found = yield from text.up_to(self.end_call)
        if found is None:
            text.at = len(text.whole)
            return False
        try:
            name, arguments = self._parsed(found[0])
        except ValueError:
            return False
        yield from call_parts(name, json.dumps(arguments, ensure_ascii=False))
        return True

    def _parsed(self, call: str) -> tuple[str, Any]:
        """The name and the arguments of a call.

        Raises:
            ValueError: it is none.
        """
        head = _HEAD.match(call)
        if head is None:
            raise ValueError("no name")
        values = _Values(call[head.end() :], self.quote)
        arguments = values.read()
        values.expect("")
        return head[1], arguments

    def call_rules(self, rule: str, tool: Tool, spell: Spell) -> str:
        """Its arguments in the order of the schema; each value by its type, as far as that goes."""
        value, rules = self._object(f"{rule}_value", parameters_of(tool), spell)
        start = spell(f"{self.begins[0]}call:{name_of(tool)}")
        return f"{rule}: {start} {value} {spell(self.end_call)}\n{rules}"

    def _object(self, rule: str, schema: Mapping[str, Any], spell: Spell) -> tuple[str, str]:
        """An expression of an object with all the properties that its schema requires."""
        properties, rules, pieces = schema.get("properties"), "", list[str]()
        named = properties if isinstance(properties, Mapping) else {}
        for number, (key, of_key) in enumerate(named.items()):
            if key in schema.get("required", ()):
                value, more = self._value(f"{rule}_{number}", of_key, spell)
                pieces.append(f"{literal(('' if not pieces else ',') + key + ':')} {value}")
                rules += more
        return f"{literal('{')} {' '.join(pieces)} {literal('}')}", rules

    def _value(self, rule: str, schema: object, spell: Spell) -> tuple[str, str]:
        schema = schema if isinstance(schema, Mapping) else {}
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            return self._object(rule, schema, spell)
        if kind == "array":
            inner, rules = self._value(f"{rule}_item", schema.get("items"), spell)
            return f'"[" ({inner} ("," {inner})*)? "]"', rules
        if not is_text(schema):
            return rule, schema_rule(rule, schema)
        if choices := choices_of(schema):
            texts = " | ".join(spell(f"{self.quote}{choice}{self.quote}") for choice in choices)
            return f"({texts})", ""
        return f"{spell(self.quote)} {rule}", spell.free_up_to(rule, self.quote)


class FunctionGemma(Gemma4):
    """See `Format`."""

    name = "functiongemma"
    shows = ("<start_function_call>",)
    begins = ("<start_function_call>",)
    think, end_think, stops_thinking = Format.think, Format.end_think, Format.stops_thinking
    end_call = "<end_function_call>"
    quote = "<escape>"

    def marks(self) -> tuple[str, ...]:
        return (*Format.marks(self), self.quote)


class _Values:
    """Reads values of this form. `ValueError` where there is none."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def read(self) -> Any:
        self._at += len(self._rest) - len(self._rest.lstrip())
        if self._takes("{"):
            return dict(self._items("}", self._pair))
        if self._takes("["):
            return self._items("]", self.read)
        if self._takes(self._quote):
            return self._up_to(self._quote)
        if self._rest.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(self._rest)
            self._at += end
            return value
        word = _WORD.match(self._rest)
        assert word is not None
        self._at += word.end()
        try:
            return json.loads(word[0])
        except ValueError:
            return word[0].strip()

    def expect(self, mark: str) -> None:
        if self._rest.strip() != mark:
            raise ValueError("more than a value")

    @property
    def _rest(self) -> str:
        return self._text[self._at :]

    def _takes(self, mark: str) -> bool:
        is_there = self._rest.startswith(mark)
        self._at += len(mark) * is_there
        return is_there

    def _up_to(self, mark: str) -> str:
        end = self._text.index(mark, self._at)
        value, self._at = self._text[self._at : end], end + len(mark)
        return value

    def _pair(self) -> tuple[str, Any]:
        self._at += len(self._rest) - len(self._rest.lstrip())
        key = self._up_to(self._quote) if self._takes(self._quote) else None
        before = self._up_to(":").strip()
        return before if key is None else key, self.read()

    def _items(self, end: str, read: Any) -> list[Any]:
        items: list[Any] = []
        while not self._takes(end):
            items.append(read())
            self._at += len(self._rest) - len(self._rest.lstrip())
            if not self._takes(",") and not self._rest.startswith(end):
                raise ValueError("a list or an object does not end")
        return items
