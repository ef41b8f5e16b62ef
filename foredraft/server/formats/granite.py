"""A list in JSON behind ``<|tool_call|>``: Granite 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foredraft.server.formats.base import Format, Spell, Tool
from foredraft.server.formats.reading import Incoming, Reads, json_calls

CALL = "<|tool_call|>"


class Granite(Format):
    """See `Format`."""

    name = "granite"
    shows: ClassVar[tuple[str, ...]] = (CALL,)
    begins = (CALL,)
    between = ", "
    before_call = f"{CALL}["
    after_call = "]"

    def calls(self, text: Incoming, mark: str, tools: Sequence[Tool]) -> Reads[bool]:
        return (yield from json_calls(text))

    def call_rules(self, rule: str, tool: Tool, spell: Spell) -> str:
        call, rules = self.json_call(rule, tool)
        return f"{rule}: {call}\n{rules}"
