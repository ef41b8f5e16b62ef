"""Parameters between marks, each by itself: Qwen3-Coder, Qwen3.5."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from foredraft.server.formats.base import (
    Format,
    Spell,
    Tool,
    choices_of,
    is_text,
    literal,
    name_of,
    parameters_of,
    schema_rule,
)
from foredraft.server.formats.hermes import CALL, END_CALL
from foredraft.server.formats.reading import Incoming, Part, Reads, held

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Qwen3Coder(Format):
    """See `Format`. Texts stand as they are; other values are JSON, by the tool's schema."""

    name = "qwen3_coder"
    shows = (FUNCTION,)
    begins = (CALL, FUNCTION)
    end_call = END_CALL

    def calls(self, text: Incoming, mark: str, tools: Sequence[Tool]) -> Reads[bool]:
        if mark == CALL:
            yield from text.skip()
            if not (yield from text.takes(FUNCTION)):
                return False
        found = yield from text.up_to(">")
        if found is None:
            return False
        name = found[0].strip()
        yield Part("call", name)
        schemas = next((_properties(tool) for tool in tools if name_of(tool) == name), {})
        before = "{"
        while (parameter := (yield from _next_parameter(text))) is not None:
            yield Part("arguments", f"{before}{json.dumps(parameter, ensure_ascii=False)}: ")
            if not (yield from _value(text, schemas.get(parameter, {}))):
                return True  # it was cut
            before = ", "
        yield Part("arguments", "{}" if before == "{" else "}")
        for end in (END_FUNCTION, END_CALL):
            start = text.at
            yield from text.skip()
            if not (yield from text.takes(end)):
                text.at = start
        return True

    def call_rules(self, rule: str, tool: Tool, spell: Spell) -> str:
        required = parameters_of(tool).get("required", ())
        calls, rules = [], ""
        for number, (name, schema) in enumerate(_properties(tool).items()):
            parameter = f"{rule}_{number}"
            value, rules_of_value = _value_rules(f"{parameter}_value", schema)
            start = f"{PARAMETER}{name}>\n"
            rules += f"{parameter}: {spell(start)} {value}\n{rules_of_value}"
            calls.append(parameter if name in required else f"{parameter}?")
        start, end = f"{CALL}\n{FUNCTION}{name_of(tool)}>\n", f"{END_FUNCTION}\n{END_CALL}"
        return f"{rule}: {spell(start)} {' '.join(calls)} {spell(end)}\n{rules}"


def _next_parameter(text: Incoming) -> Reads[str | None]:
    yield from text.skip()
    if not (yield from text.takes(PARAMETER)):
        return None
    found = yield from text.up_to(">")
    return None if found is None else found[0].strip()


def _value(text: Incoming, schema: Mapping[str, Any]) -> Reads[bool]:
    """A parameter's value as JSON, and the mark behind it. False: it was cut."""
    ends = (f"\n{END_PARAMETER}", END_PARAMETER)
    yield from text.takes("\n")
    if not is_text(schema):
        found = yield from text.up_to(*ends)
        value = text.rest if found is None else found[0]
        text.at = len(text.whole) if found is None else text.at
        yield Part("arguments", _as_json(value))
        return found is not None
    yield Part("arguments", '"')
    while True:
        at = text.rest.find(END_PARAMETER)
        size = at if at >= 0 else len(text.rest) - held(text.rest, ends)
        kept = text.rest[:size].removesuffix("\n") if at >= 0 else text.rest[:size]
        yield Part("arguments", json.dumps(kept, ensure_ascii=False)[1:-1])
        text.at += size
        if at >= 0:
            text.at += len(END_PARAMETER)
            yield Part("arguments", '"')
            return True
        if not (yield from text.more()):
            yield Part("arguments", json.dumps(text.rest, ensure_ascii=False)[1:-1])
            text.at = len(text.whole)
            return False


def _value_rules(rule: str, schema: Mapping[str, Any]) -> tuple[str, str]:
    """An expression of a value with the mark behind it, and the rules that it needs."""
    end = f"\n{END_PARAMETER}\n"
    choices = choices_of(schema)
    if is_text(schema) and not choices:
        return rule, f"{rule}[suffix={literal(end)}]: /(?s:.*)/\n"
    if is_text(schema):
        texts = " | ".join(literal(str(each)) for each in choices)
        return f"({texts}) {literal(end)}", ""
    return f"{rule} {literal(end)}", schema_rule(rule, schema)


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = parameters_of(tool).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _as_json(value: str) -> str:
    value = _WORDS.get(value.strip(), value.strip())
    try:
        from_json(value, allow_inf_nan=False)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    return value
