"""Calls as ``call:name{key:value}``, with marks around texts: Gemma 4, FunctionGemma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from foredraft.server.formats.base import (
    Format,
    Spell,
    Tool,
    choices_of,
    is_text,
    literal,
    name_of,
    parameters_of,
    properties_of,
    required_of,
    schema_rule,
)
from foredraft.server.formats.reading import Incoming, Reads, call_parts
from foredraft.server.formats.values import Values


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
        call = Values(found[0], self.quote).whole(_call)
        if call:
            yield from call_parts(*call)
        return call is not None

    def call_rules(self, rule: str, tool: Tool, spell: Spell) -> str:
        """Its arguments in the order of the schema; each value by its type, as far as that goes."""
        value, rules = self._object(f"{rule}_value", parameters_of(tool), spell)
        start = spell(f"{self.begins[0]}call:{name_of(tool)}")
        return f"{rule}: {start} {value} {spell(self.end_call)}\n{rules}"

    def _object(self, rule: str, schema: Mapping[str, Any], spell: Spell) -> tuple[str, str]:
        """An expression of an object with all the properties that its schema requires."""
        rules, pieces = "", list[str]()
        for number, (key, of_key) in enumerate(properties_of(schema).items()):
            if key in required_of(schema):
                value, more = self._value(f"{rule}_{number}", of_key, spell)
                pieces.append(f"{literal(('' if not pieces else ',') + key + ':')} {value}")
                rules += more
        return f"{literal('{')} {' '.join(pieces)} {literal('}')}", rules

    def _value(self, rule: str, schema: object, spell: Spell) -> tuple[str, str]:
        schema = schema if isinstance(schema, Mapping) else {}
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            return self._object(rule, schema, spell)
        if kind == "array" and "$ref" not in str(schema):
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


def _call(values: Values) -> tuple[str, dict[str, Any]]:
    values.takes("call:")
    return values.call("{", ":", "}")
