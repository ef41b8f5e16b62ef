"""JSON between ``<tool_call>`` marks: Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4."""

from __future__ import annotations

from foredraft.server.formats.base import Format, Spell, Tool

CALL, END_CALL = "<tool_call>", "</tool_call>"


class Hermes(Format):
    """See `Format`."""

    name = "hermes"
    shows = (CALL,)
    begins = (CALL,)
    end_call = END_CALL

    def call_rules(self, rule: str, tool: Tool, spell: Spell) -> str:
        call, rules = self.json_call(rule, tool)
        start, end = spell(f"{CALL}\n"), spell(f"\n{END_CALL}")
        return f"{rule}: {start} {call} {end}\n{rules}"
