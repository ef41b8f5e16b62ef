"""Calls as in Python, in a list between marks: LFM2, LFM2.5."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from foredraft.server.formats.base import (
    Format,
    Spell,
    Tool,
    literal,
    name_of,
    parameters_of,
    properties_of,
    required_of,
    schema_rule,
)
from foredraft.server.formats.reading import Incoming, Reads, call_parts, json_calls
from foredraft.server.formats.values import Values

CALL, END_CALL = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON = (str, list, dict)


class Lfm25(Format):
    """See `Format`. Calls are passed on when all are there; such a list in JSON is read as well."""

    name = "lfm2.5"
    shows: ClassVar[tuple[str, ...]] = (CALL,)
    begins = (CALL,)
    end_call = END_CALL
    before_call, between, after_call = f"{CALL}[", ", ", f"]{END_CALL}"

    def thinks(self, template: str) -> bool:
        """Some templates know no more of thoughts than how they end."""
        return self.end_think in template

    def calls(self, text: Incoming, mark: str, tools: Sequence[Tool]) -> Reads[bool]:
        start = text.at
        found = yield from text.up_to(self.end_call)
        inner = (text.rest if found is None else found[0]).strip()
        if inner.lstrip("[ \n").startswith("{"):
            text.at = start
            return (yield from json_calls(text, self.end_call))
        text.at = len(text.whole) if found is None else text.at
        calls = Values(inner if inner.startswith("[") else f"[{inner}]").whole(_calls)
        for call in calls or ():
            yield from call_parts(*call)
        return bool(calls)

    def call_rules(self, rule: str, tool: Tool, spell: Spell) -> str:
        """Its required arguments, then others, in the order of the schema."""
        schema, rules = parameters_of(tool), ""
        required, others = list[str](), list[str]()
        for number, (name, of_value) in enumerate(properties_of(schema).items()):
            argument, value = f"{rule}_{number}", f"{rule}_{number}_value"
            is_flag = of_value.get("type") == "boolean"
            rules += f"{argument}: {literal(f'{name}=')} {value}\n"
            rules += f'{value}: "True" | "False"\n' if is_flag else schema_rule(value, of_value)
            (required if name in required_of(schema) else others).append(argument)
        behind = [*(f"{each}_behind" for each in others), ""]  # of each, and those after it
        for each, here, more in zip(others, behind, behind[1:], strict=False):
            rules += f'{here}: (", " {each})? {more}\n'
        heads = [*map(" ".join, zip(others, behind[1:], strict=True))]
        if required:
            heads = [' ", " '.join(required) + f" {behind[0]}"]
        arguments = f"({' | '.join(heads)}){'' if required else '?'}" if heads else ""
        return f"{rule}: {literal(f'{name_of(tool)}(')} {arguments} {literal(')')}\n{rules}"


class Lfm2(Lfm25):
    """See `Format`: its templates show no calls of earlier turns, so they stand in the texts."""

    name = "lfm2"
    shows = ("List of tools: ", "<|im_start|>")

    def adapted(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
    ) -> Sequence[dict[str, Any]]:
        return [_with_calls(each) if each.get("tool_calls") else each for each in messages]


def _calls(values: Values) -> list[tuple[str, dict[str, Any]]]:
    values.takes("[")
    return list(values.items("]", lambda: values.call("(", "=", ")")))


class _WithMarks(str):
    """Calls, and the text behind them. The marks are the model's, the rest of it is content.

    `foredraft.models.text.chat_encoding` hides special tokens in texts by `translate`.
    """

    parts: tuple[str, str]

    def translate(self, table: Any) -> str:
        calls, text = (part.translate(table) for part in self.parts)
        return f"{CALL}{calls}{END_CALL}{text}"


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for name, arguments in (call["function"].values() for call in message["tool_calls"]):
        named = arguments.items() if isinstance(arguments, Mapping) else ()
        texts = (
            f"{key}={json.dumps(each, ensure_ascii=False) if isinstance(each, _JSON) else each}"
            for key, each in named
        )
        calls.append(f"{name}({', '.join(texts)})")
    parts = f"[{', '.join(calls)}]", message["content"]
    content = _WithMarks(f"{CALL}{parts[0]}{END_CALL}{parts[1]}")
    content.parts = parts
    return {**message, "content": content}
