"""Calls between marks of their own, the name before the arguments: DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foredraft.server.formats.base import Format, Tool
from foredraft.server.formats.reading import Incoming, Part, Reads, json_value

_BAR = "\uff5c"  # a wide vertical line
CALLS, END_CALLS = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
CALL, END_CALL = f"<{_BAR}tool▁call▁begin{_BAR}>", f"<{_BAR}tool▁call▁end{_BAR}>"
SEPARATOR = f"<{_BAR}tool▁sep{_BAR}>"


class DeepSeek(Format):
    """See `Format`: the form of V3.1. Both forms are read."""

    name = "deepseek_v3.1"
    shows: ClassVar[tuple[str, ...]] = (CALLS, SEPARATOR)
    begins = (CALLS, CALL)
    between = ""
    before_call, after_call = CALLS, END_CALLS
    opens, closes = f"{CALL}NAME{SEPARATOR}", END_CALL

    def marks(self) -> tuple[str, ...]:
        return (*super().marks(), SEPARATOR, END_CALL, END_CALLS)

    def calls(self, text: Incoming, mark: str, tools: Sequence[Tool]) -> Reads[bool]:
        found, is_call = False, mark == CALL
        while is_call or (yield from _begins(text)):
            is_call = False
            head = yield from text.up_to(SEPARATOR)
            if head is None:
                text.at = len(text.whole)
                return found
            name = head[0]
            if name.strip() == "function":  # V3: the name stands behind it, the JSON in a fence
                line = yield from text.up_to("\n")
                name = text.rest if line is None else line[0]
                yield from text.skip()
                yield from text.takes("```json")
            found = True
            yield Part("call", name.strip())
            yield from text.skip()
            yield from json_value(text, END_CALL)
            if (yield from text.up_to(END_CALL)) is None:
                text.at = len(text.whole)
        yield from text.takes(END_CALLS)
        return found


class DeepSeekV3(DeepSeek):
    """See `Format`."""

    name = "deepseek_v3"
    shows = (CALLS, SEPARATOR, "```json")
    opens, closes = f"{CALL}function{SEPARATOR}NAME\n```json\n", f"\n```{END_CALL}"


def _begins(text: Incoming) -> Reads[bool]:
    yield from text.skip()
    return (yield from text.takes(CALL))
