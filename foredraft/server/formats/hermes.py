"""JSON between ``<tool_call>`` marks: Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4."""

from __future__ import annotations

from foredraft.server.formats.base import Format

CALL, END_CALL = "<tool_call>", "</tool_call>"


class Hermes(Format):
    """See `Format`."""

    name = "hermes"
    shows = (CALL,)
    begins = (CALL,)
    end_call = END_CALL
    opens, closes = f"{CALL}\n", f"\n{END_CALL}"
