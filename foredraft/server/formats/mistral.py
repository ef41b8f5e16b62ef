"""Calls behind ``[TOOL_CALLS]``: a list in JSON (v3), or names and arguments (v11, tekken)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

from foredraft.server.formats.base import Format, Tool
from foredraft.server.formats.reading import Incoming, Part, Reads, json_calls, json_value

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARACTERS = 9


class MistralV3(Format):
    """See `Format`. Both forms are read; this one is written."""

    name = "mistral_v3"
    shows: ClassVar[tuple[str, ...]] = (CALLS,)
    begins = (CALLS,)
    before_call, between, after_call = f"{CALLS}[", ", ", "]"
    think, end_think, stops_thinking = "[THINK]", "[/THINK]", "[/THINK]"

    def marks(self) -> tuple[str, ...]:
        return (*super().marks(), ARGUMENTS, CALL_ID)

    def adapted(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
    ) -> Sequence[dict[str, Any]]:
        """The templates take ids of nine letters and digits, and no others."""
        return [_with_short_ids(message) for message in messages]

    def calls(self, text: Incoming, mark: str, tools: Sequence[Tool]) -> Reads[bool]:
        yield from text.skip()
        if text.rest.startswith(("[{", "{", "[ ")) or text.rest == "[":
            return (yield from json_calls(text))
        found = yield from text.up_to(ARGUMENTS, CALL_ID, "{")
        if found is not None and found[1] == CALL_ID:
            name = found[0]
            found = yield from text.up_to(ARGUMENTS)
            found = found and (name, ARGUMENTS)
        if found is None:
            text.at = len(text.whole)
            return False
        text.at -= found[1] == "{"
        yield Part("call", found[0].strip())
        yield from text.skip()
        yield from json_value(text, CALLS)
        return True


class MistralTekken(MistralV3):
    """See `Format`."""

    name = "mistral_tekken"
    shows = (CALLS, ARGUMENTS)
    before_call = after_call = between = ""
    opens = f"{CALLS}NAME{ARGUMENTS}"


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    short = dict(message)
    if message.get("tool_call_id") is not None:
        short["tool_call_id"] = _short(str(message["tool_call_id"]))
    if calls := message.get("tool_calls"):
        short["tool_calls"] = [{**call, "id": _short(str(call["id"]))} for call in calls]
    return short


def _short(call_id: str) -> str:
    if len(call_id) == _ID_CHARACTERS and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_ID_CHARACTERS]
