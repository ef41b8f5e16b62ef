"""Parameters between marks, each by itself: Qwen3-Coder, Qwen3.5, Seed-OSS, GLM 4.5."""

from __future__ import annotations

import json
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
from foredraft.server.formats.hermes import CALL, END_CALL
from foredraft.server.formats.reading import Incoming, Part, Reads, as_json, held
from foredraft.server.formats.values import value_of

FUNCTION, END_FUNCTION = "<function=", "</function>"
_SEED_CALL, _END_SEED_CALL = "<seed:tool_call>", "</seed:tool_call>"


class Qwen3Coder(Format):
    """See `Format`. Texts stand as they are; other values are JSON, by the tool's schema.

    Attributes:
        ends_name: marks behind a function's name; all but the first begin what follows.
        key, end_key: stand around the name of a parameter.
        value, end_value: stand around its value.
        line: stands at both ends of a value.
    """

    name = "qwen3_coder"
    shows = (FUNCTION,)
    begins: ClassVar[tuple[str, ...]] = (CALL, FUNCTION)
    end_call = END_CALL
    opens, closes = f"{CALL}\n{FUNCTION}NAME>\n", f"{END_FUNCTION}\n{END_CALL}"
    ends_name: ClassVar[tuple[str, ...]] = (">",)
    key: ClassVar[str] = "<parameter="
    end_key: ClassVar[str] = ">"
    value: ClassVar[str] = ""
    end_value: ClassVar[str] = "</parameter>"
    line: ClassVar[str] = "\n"

    def calls(self, text: Incoming, mark: str, tools: Sequence[Tool]) -> Reads[bool]:
        yield from text.skip()
        if mark != self.begins[-1] and not (yield from text.takes(self.begins[-1])):
            return False
        found = yield from text.up_to(*self.ends_name)
        if found is None or len(found[0].split()) != 1:
            return False
        text.at -= 0 if found[1] == self.ends_name[0] else len(found[1])
        name = found[0].strip()
        yield Part("call", name)
        named = (parameters_of(tool) for tool in tools if name_of(tool) == name)
        schemas = properties_of(next(named, {}))
        before = "{"
        while (parameter := (yield from self._next_parameter(text))) is not None:
            yield Part("arguments", f"{before}{json.dumps(parameter, ensure_ascii=False)}: ")
            if not (yield from self._value(text, schemas.get(parameter, {}))):
                return True  # it was cut
            before = ", "
        yield Part("arguments", "{}" if before == "{" else "}")
        for end in (END_FUNCTION, self.end_call):
            start = text.at
            yield from text.skip()
            if not (yield from text.takes(end)):
                text.at = start
        return True

    def call_rules(self, rule: str, tool: Tool, spell: Spell) -> str:
        schema = parameters_of(tool)
        calls, rules = [], ""
        for number, (name, of_value) in enumerate(properties_of(schema).items()):
            parameter = f"{rule}_{number}"
            value, rules_of_value = self._value_rules(f"{parameter}_value", of_value, spell)
            start = f"{self.key}{name}{self.end_key}{self.value}{self.line}"
            rules += f"{parameter}: {spell(start)} {value}\n{rules_of_value}"
            calls.append(parameter if name in required_of(schema) else f"{parameter}?")
        start, end = spell(self.opens.replace("NAME", name_of(tool))), spell(self.closes)
        return f"{rule}: {start} {' '.join(calls)} {end}\n{rules}"

    def _next_parameter(self, text: Incoming) -> Reads[str | None]:
        yield from text.skip()
        if not (yield from text.takes(self.key)):
            return None
        found = yield from text.up_to(self.end_key)
        if self.value:
            yield from text.skip()
            yield from text.takes(self.value.strip())
        return None if found is None else found[0].strip()

    def _value(self, text: Incoming, schema: Mapping[str, Any]) -> Reads[bool]:
        """A parameter's value as JSON, and the mark behind it. False: it was cut."""
        ends = (f"{self.line}{self.end_value}", self.end_value)
        yield from text.takes(self.line)
        if not is_text(schema):
            found = yield from text.up_to(*ends)
            value = text.rest if found is None else found[0]
            text.at = len(text.whole) if found is None else text.at
            yield Part("arguments", as_json(value_of(value)))
            return found is not None
        yield Part("arguments", '"')
        while True:
            at = text.rest.find(self.end_value)
            size = at if at >= 0 else len(text.rest) - held(text.rest, ends)
            kept = text.rest[:size].removesuffix(self.line) if at >= 0 else text.rest[:size]
            yield Part("arguments", json.dumps(kept, ensure_ascii=False)[1:-1])
            text.at += size
            if at >= 0:
                text.at += len(self.end_value)
                yield Part("arguments", '"')
                return True
            if not (yield from text.more()):
                yield Part("arguments", json.dumps(text.rest, ensure_ascii=False)[1:-1])
                text.at = len(text.whole)
                return False

    def _value_rules(self, rule: str, schema: Mapping[str, Any], spell: Spell) -> tuple[str, str]:
        """An expression of a value with the mark behind it, and the rules that it needs."""
        end, choices = f"{self.line}{self.end_value}", choices_of(schema)
        if is_text(schema) and not choices:
            return f'{rule} "\\n"', spell.free_up_to(rule, end)
        if is_text(schema):
            texts = " | ".join(literal(str(each)) for each in choices)
            return f'({texts}) {spell(end)} "\\n"', ""
        return f'{rule} {spell(end)} "\\n"', schema_rule(rule, schema)


class SeedOss(Qwen3Coder):
    """See `Format`: the same between other marks, without lines of their own for values."""

    name = "seed_oss"
    shows = (_SEED_CALL,)
    begins = (_SEED_CALL, FUNCTION)
    end_call = _END_SEED_CALL
    opens, closes = f"{_SEED_CALL}\n{FUNCTION}NAME>\n", f"{END_FUNCTION}\n{_END_SEED_CALL}"
    line = ""
    think, end_think, stops_thinking = "<seed:think>", "</seed:think>", "</seed:think>"


class Glm(Qwen3Coder):
    """See `Format`: a parameter's name and its value stand between marks each."""

    name = "glm"
    shows = ("<arg_key>",)
    begins = (CALL,)
    opens, closes = f"{CALL}NAME\n", END_CALL
    ends_name = ("\n", "<arg_key>", END_CALL)
    key, end_key, value, end_value = "<arg_key>", "</arg_key>", "\n<arg_value>", "</arg_value>"
    line = ""

    def marks(self) -> tuple[str, ...]:
        return (*super().marks(), self.key, self.end_key, self.value.strip(), self.end_value)
