"""A list in JSON between ``<|tool_call|>`` marks; tools stand in the system message: Phi-4-mini."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from foredraft.server.formats.base import Tool
from foredraft.server.formats.granite import Granite

END_CALL = "<|/tool_call|>"


class Phi4Mini(Granite):
    """See `Format`."""

    name = "phi4_mini"
    shows = ("<|tool|>", "<|/tool|>")
    end_call = END_CALL
    after_call = f"]{END_CALL}"

    def adapted(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
    ) -> Sequence[dict[str, Any]]:
        """Its template looks for the tools in the system message."""
        if not tools:
            return messages
        shown = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        first, *others = messages
        if first["role"] != "system":
            return [{"role": "system", "content": "", "tools": shown}, *messages]
        return [{**first, "tools": shown}, *others]
