"""A list in JSON behind ``<|tool_call|>``: Granite 3."""

from __future__ import annotations

from typing import ClassVar

from foredraft.server.formats.base import Format

CALL = "<|tool_call|>"


class Granite(Format):
    """See `Format`."""

    name = "granite"
    shows: ClassVar[tuple[str, ...]] = (CALL,)
    begins = (CALL,)
    between = ", "
    before_call = f"{CALL}["
    after_call = "]"
